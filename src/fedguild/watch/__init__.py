"""A local page that follows a run, a comparison, a federation or a folder of runs while it goes on.

`view_of` says what a folder shows, a `Follower` reads its files as they grow and keeps a `Board`, and the server hands
the board's changes to the page. Everything is read; nothing is written.
"""
