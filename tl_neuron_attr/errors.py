"""The error of models that cannot be attributed."""


class UnsupportedModelError(ValueError):
    """The model, or a part of it, is one for which neuron scores are not defined or not known to be right."""
