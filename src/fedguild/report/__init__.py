"""Run folders, and nothing else, as tables, figures and one HTML page.

`tables` and `comparison` turn one run, or several methods over several seeds, into numbers; `grid` prints those;
`figures` and `comparison_figures` draw them; `html` puts everything on a page that needs no network and no script.
`watch` is a page that follows a run.
"""
