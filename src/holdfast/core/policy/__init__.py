"""Every setting: its default, its checks, and where its value comes from."""
