"""`python -m octavo.sandbox`: a sandbox process; see octavo.sandbox.child."""

from octavo.sandbox.child import main

if __name__ == "__main__":
    main()
