"""`python -m kvlab` is `python -m kvlab.experiment`."""

from kvlab.doors import exit_code


def main() -> int:
    """The script `kvlab`: its exit code."""

    def experiment() -> int:
        from kvlab.experiment import main as run

        return run()

    return exit_code(experiment)


if __name__ == "__main__":
    raise SystemExit(main())
