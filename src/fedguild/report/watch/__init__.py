"""A local page that follows a run, a comparison, a federation or a folder of runs as it goes on.

`view_of` recognises a folder. A `Follower` reads its files as they grow and keeps a `Board`, and the server passes the
board's changes to the page. Nothing is written.
"""
