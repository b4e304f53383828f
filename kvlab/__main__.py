"""`python -m kvlab` is `python -m kvlab.experiment`."""

from kvlab.experiment import main
from kvlab.types.piping import exit_code

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
