int codec_v1(void) { return 41; }
