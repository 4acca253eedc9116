//! Hosts one contiguous range of layers for authenticated peers.
