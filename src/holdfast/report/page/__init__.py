"""Create HTML pages about one run (`holdfast report`) or several runs (`holdfast compare`).

``gathering.gather`` reads the recordings of a run, ``run_page.render`` turns them into a page, and
``comparing.Comparison`` compares several runs. Read the modules in this order:

1. ``gathering``, with ``lanes``, ``attachments`` and ``images``.
2. ``run_page``, with ``figures``, ``goodput`` and ``environment``.
3. ``offline_page``, which escapes all text, and ``templates``, which define the layout.
"""
