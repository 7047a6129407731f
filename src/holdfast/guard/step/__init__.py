"""The step as a transaction: attempts, the way back, the commit.

Who splits a batch is `splitting`.
"""
