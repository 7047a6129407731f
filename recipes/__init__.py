"""Systems that train for real under holdfast, from data that needs no download.

``python -m recipes.<name>``.
"""
