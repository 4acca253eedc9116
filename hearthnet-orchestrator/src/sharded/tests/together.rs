//! Chats that move from host to host together.

use super::*;

#[test]
fn chats_whose_rows_came_together_send_together_and_none_waits_for_one_that_does_something_else() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let [first, last] = [0, 1].map(|at| Arc::clone(&stage.hosts[at]));
    first.state().pairs = true;
    let [mut busy, mut keen] = [stage.open(), stage.open()];
    for backend in [&mut busy, &mut keen] {
        backend.begin_call();
        // So that no stream has to grow on the way.
        backend.expect(2, &stage.cancel);
        backend.submit(0, &row(5), &stage.cancel);
    }
    // The answers to both come in one piece, and `busy` does not look.
    let mut run = Run {
        cancel: &stage.cancel,
        notify: &mut |_| panic!("no host has failed"),
    };
    let mut out = Vec::new();
    let began = Instant::now();
    keen.output(&mut out, &mut run).unwrap();
    // A keep-alive would have carried off in the end what waited for `busy`.
    assert!(began.elapsed() < Config::default().keep_alive / 2);
    assert_eq!(
        (out[0] as u32, last.state().steps),
        (undisturbed(&[(&[5], 0)])[0], 1)
    );

    // Two that have their rows of the same batch: the first to send waits for the second.
    let write_batch = WriteBatch::default();
    busy.output(&mut out, &mut run).unwrap();
    first.state().pairs = false;
    let frames = || stage.links[0].stats().frames_sent;
    let before = frames();
    busy.join(write_batch.clone());
    busy.submit(1, &row(7), &stage.cancel);
    assert_eq!((frames(), first.state().steps), (before, 2));
    keen.join(write_batch);
    keen.submit(1, &row(7), &stage.cancel);
    assert_eq!(frames(), before + 2);
    stage.until("the rows were not sent", || first.state().steps == 4);
    for backend in [&mut busy, &mut keen] {
        backend.output(&mut out, &mut run).unwrap();
    }
    drop((busy, keen));
    stage.until_empty();
}
