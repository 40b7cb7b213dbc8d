"""What every test stands on: one thread, no network, no colours.

Set before torch or tokenizers are loaded by any test module: two OpenMP threads on a shared machine stall
for milliseconds, and tokenizers warns after a fork.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["NO_COLOR"] = "1"
