"""`python -m octavo.tool`: a tool process; see octavo.tool.child."""

from octavo.tool.child import main

if __name__ == "__main__":
    main()
