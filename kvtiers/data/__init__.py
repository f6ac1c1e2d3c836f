"""The plane that moves bytes: takes orders, answers with one outcome per block, decides nothing."""
