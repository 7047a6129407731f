"""Small trainings with one planted loss of exactness each, and exact ones.

Does `holdfast chaos` tell them apart?
"""
