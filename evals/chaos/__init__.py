"""Small trainings with one planted loss of exactness each, and exact ones: does `holdfast chaos` tell them apart?"""
