"""Do query neurons matter? Zero the top query neurons of the first two thirds of the layers and run again.

    python tests/benchmarks/query_ablation.py [--sizes 10 50 100] [--controls 10]

For each prompt whose answer is one token and in the model's top 10: the query neurons (MLP, first two thirds of
the layers) of the top 100 attention and top 100 MLP value neurons are ranked for the right answer; the top ones
are zeroed at every position, beside as many random neurons of the same layers. Printed: the fall of the log-
probability in nats, mean and standard deviation over prompts, for both, and on how many prompts the fall is the
larger one.
"""

import argparse
import warnings

import torch

import tl_neuron_attr as na
from tl_neuron_attr.query import TinyDenominatorWarning

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Austria": "Vienna",
    "England": "London",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Turkey": "Ankara",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Hungary": "Budapest",
}
LANGUAGES = {
    "Paris": "French",
    "Rome": "Italian",
    "Berlin": "German",
    "Madrid": "Spanish",
    "Tokyo": "Japanese",
    "Beijing": "Chinese",
    "Moscow": "Russian",
    "Athens": "Greek",
    "Cairo": "Arabic",
    "London": "English",
    "Lisbon": "Portuguese",
    "Warsaw": "Polish",
    "Stockholm": "Swedish",
    "Amsterdam": "Dutch",
    "Seoul": "Korean",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "black": "white",
    "good": "bad",
    "day": "night",
    "rich": "poor",
    "open": "closed",
    "left": "right",
    "fast": "slow",
    "young": "old",
    "strong": "weak",
}
PROMPTS = [
    *((f"The capital of {country} is", f" {city}") for country, city in CAPITALS.items()),
    *((f"In {city}, people speak", f" {language}") for city, language in LANGUAGES.items()),
    *((f"The opposite of {word} is", f" {other}") for word, other in OPPOSITES.items()),
]


def traced(model):
    """Traces of the prompts whose answer is one token."""
    for prompt, answer in PROMPTS:
        try:
            yield na.trace(model, prompt, answer)
        except na.TargetError:
            continue


def ranked_query_neurons(trace, n, layers):
    """The top ``n`` query neurons of ``layers`` for value neurons of both kinds together."""
    value = [*na.value_neurons(trace, "attn", 100), *na.value_neurons(trace, "mlp", 100)]
    return na.query_neurons(trace, value, "mlp", n, layers=layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--controls", type=int, default=10)
    options = parser.parse_args()
    warnings.simplefilter("ignore", TinyDenominatorWarning)
    model = na.load_demo_model()
    traces = list(traced(model))
    known = [t for t in traces if (t.log_probs > t.log_probs[t.target.positive[0]]).sum() < 10]
    print(f"{len(PROMPTS)} prompts; {len(traces)} with an answer of one token; {len(known)} with it in the top 10")
    shallow = range(2 * model.cfg.n_layers // 3)
    ranked = [ranked_query_neurons(trace, max(options.sizes), shallow) for trace in known]
    print(f"layers 0 to {shallow[-1]}; fall of the answer's log-probability in nats, mean (sd) over prompts")
    for size in options.sizes:
        effect = na.ablation_effect(known, [r.top(size) for r in ranked], controls=options.controls)
        before, after, controls = effect.before.log_prob, effect.after.log_prob, effect.controls.log_prob
        fall, random = before - after, (before - controls).mean(0)
        larger = int((before - after > (before - controls).amax(0)).sum())
        print(
            f"{size:>4} neurons: query {fall.mean():.2f} ({fall.std():.2f}), random {random.mean():.3f} "
            f"({random.std():.3f}); larger than every one of {options.controls} draws on {larger} of {len(known)}"
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
