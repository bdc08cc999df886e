"""What the labs' run.py share: engines in processes of their own, what is installed, where from.

The standard library only, so that it works in whichever environment a run is started.
"""
