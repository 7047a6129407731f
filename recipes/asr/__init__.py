"""Speech recognition.

Characters from speech by CTC, with a small convolutional and recurrent encoder.
"""
