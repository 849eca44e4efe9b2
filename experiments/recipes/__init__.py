"""Recipes: programs that apply trained models, or write texts for them."""
