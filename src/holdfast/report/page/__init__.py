"""The HTML pages: of one run (`holdfast report`), and of several (`holdfast compare`).

``gathering.gather`` reads everything that a run recorded; ``run_page.render`` turns it into a page,
and ``comparing.Comparison`` sets several runs side by side. Read ``gathering`` with ``lanes``,
``attachments`` and ``images``; then ``run_page`` with ``figures``, ``goodput`` and ``environment``;
then ``offline_page``, which keeps hostile text harmless. ``templates`` defines how a page looks.
"""
