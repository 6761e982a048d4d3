"""Programs behind ``make demo`` and ``make test``: standard library only, any Python >= 3.10."""
