"""The same jobs as programs of other projects, each run in an environment of its own."""
