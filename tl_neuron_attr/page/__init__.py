"""The pages of :func:`tl_neuron_attr.report`: what is gathered, as tables and figures, and as one HTML file."""
