"""Tacotron 2 (Shen et al., arXiv 1712.05884).

Text to mel spectrograms, trained from a folder as LJSpeech.

train      options, the loop, evaluation, what is written at the end
model      encoder, decoder, post-net; `decoder` has the part that goes step by step
losses     each normalised by what it is over: frames, decoder steps
folder     reads and checks a folder; `data` computes its features once, into a file, and makes
           batches
wav        files of sound
audio      log-mel spectrograms and the way back (Griffin-Lim)
synthesis  free-running inference within a bound, its memory watched
espeak     makes a small folder with espeak-ng, of sentences of a grammar
forecast   what `holdfast plan` is told
"""
