"""`python -m kvlab` is `python -m kvlab.experiment`."""

import sys

from kvlab.experiment import main

if __name__ == "__main__":
    sys.exit(main())
