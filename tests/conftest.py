"""What holds for every test: nothing is fetched, tokenizers start no threads that a fork would lose, and no example
of a property test fails for being slow on a busy machine.
"""

import os

from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
