"""``python -m tl_neuron_attr``: the command line."""

import sys

from tl_neuron_attr.cli import main

if __name__ == "__main__":
    sys.exit(main())
