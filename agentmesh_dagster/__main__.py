"""`python -m agentmesh_dagster`: the command `agentmesh`, where its script is not on the path."""

from agentmesh_dagster.cli.main import main

if __name__ == "__main__":
    main()
