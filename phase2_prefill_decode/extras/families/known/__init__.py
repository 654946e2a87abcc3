"""What a config.json may say.

classes   the classes of transformers that load, and what others would need
strict    refuses fields that are not known
wrappers  models that also read images: their text is another family
"""
