"""`python -m regrow`: the command line where its script is not on the path. Must never hold more."""

from regrow.cli import main

if __name__ == "__main__":
    main()
