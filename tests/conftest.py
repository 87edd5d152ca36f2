"""What holds for every test: nothing is fetched, and tokenizers start no threads that a fork would lose."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
