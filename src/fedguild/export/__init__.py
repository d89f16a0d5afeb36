"""A model in formats that other libraries load.

`weights` computes how a deployment changes the backbone's weights. `adapter` writes the changes as a PEFT folder,
`per_expert` with a key for every expert, `merged` as a whole Hugging Face checkpoint, and `code` as one with the
method's own modelling code. Each goes into a folder that appears complete or not at all (`folder`) and describes itself
(`card`). `live` attaches a deployment to the backbone in this process. `fedguild.runs.exporting` takes it from a run.
"""
