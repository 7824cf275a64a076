"""Draws the README's picture: from query neurons through value neurons to the prediction.

python docs/picture.py     # writes docs/pages/paris.png; needs kaleido and Chromium
"""

from pathlib import Path

import tl_neuron_attr as na

model = na.load_demo_model()
trace = na.trace(model, "The capital of France is", target=" Paris")
value = na.value_neurons(trace, "attn", k=30)
query = na.query_neurons(trace, value, k=30)
figure = na.plots.flow(query, value, na.links(trace, value, query), n_query=6, n_value=6)
figure.write_image(Path(__file__).parent / "pages" / "paris.png", width=760, scale=2)
