// The page of rollout-compare FILE: all of it is written already.
onKeys();
ready();
