"""The engine on an autograd Function: forward without a graph, a replay with one.

engine > node > passes > replay > graph > slots
"""
