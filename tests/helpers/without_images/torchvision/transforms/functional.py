"""Names of torchvision's functions."""

from torchvision import __getattr__ as __getattr__
from torchvision.transforms import InterpolationMode as InterpolationMode
