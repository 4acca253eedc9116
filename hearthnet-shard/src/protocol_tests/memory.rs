//! Memory for keys and values: who gets it, and who has to give it back.

use super::*;

#[test]
fn kv_is_promised_at_the_open_and_given_back_at_the_close() {
    // Room for 512 positions of 10 bytes.
    let mut host = Host::with_budget(5120);
    let mut caller = host.caller(1);
    caller.open(&mut host, 1);
    let large = |stream, max| open_with(stream, 1, |o| o.max_positions = max);
    assert_eq!(caller.refusal(&mut host, large(2, 257)), "kv_full");
    assert_eq!(caller.ask(&mut host, large(3, 256)), [opened(3, 1)]);
    assert_eq!(host.stats().kv_reserved_bytes, 5120);
    assert_eq!(caller.refusal(&mut host, large(4, 1)), "kv_full");
    assert_eq!(caller.ask(&mut host, close(1, 1)), []);
    assert_eq!(caller.ask(&mut host, large(5, 1)), [opened(5, 1)]);
}
