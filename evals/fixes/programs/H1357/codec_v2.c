int codec_v2(void) { return 42; }
