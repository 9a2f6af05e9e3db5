"""The commands of the read-along in recipes/tutorial/: its pages for a browser, and the checks of its exercises."""
