"""One thread of torch for every thread of a test: small models gain nothing from more, and sums of floats that are
split over threads are rounded otherwise.
"""

import torch

torch.set_num_threads(1)
