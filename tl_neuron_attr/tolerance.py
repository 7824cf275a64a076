"""How far numbers may differ by rounding alone, relative to the largest of them, by the model's precision.

``TOLERANCE`` is some hundred times the rounding error of a forward pass, far below what a wrong norm, head order or
missing bias makes (which are of the order of one). A float64 model is allowed float32's rounding once: transformers
computes RMSNorm, softmax and rotary angles in float32 inside it. ``ROUNDING`` is that of one product.
"""

import torch

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
