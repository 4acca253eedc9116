//! Chats that move from host to host together.

use futures_util::future::{join, join_all};

use super::*;

#[test]
fn chats_woken_together_send_together_without_waiting_for_busy_ones() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    let [first, last] = [0, 1].map(|at| Arc::clone(&stage.hosts[at]));
    first.state().pairs = true;
    let [mut busy, mut keen] = [stage.open(), stage.open()];
    for backend in [&mut busy, &mut keen] {
        // So that no stream has to grow later.
        backend.begin_call(2);
        let rows = row(5);
        chat_loop::block_on(backend.submit(Rows::at(0, &rows), &stage.cancel));
    }
    // The answers to both arrive in one record, while `busy` is not polled.
    let cancel = &stage.cancel;
    let output = async |backend: &mut ShardedBackend| {
        let notify = &mut |_| panic!("no host has failed");
        let out = backend.output(&mut Run { cancel, notify }).await?;
        Ok::<_, ChatError>(out[0] as u32)
    };
    let began = Instant::now();
    let came = chat_loop::block_on(output(&mut keen));
    // A keep-alive would eventually have flushed the messages of `busy`.
    assert!(began.elapsed() < Config::default().keep_alive / 2);
    let expected = undisturbed(&[(&[5], 0)])[0];
    assert_eq!((came, last.state().steps), (Ok(expected), 1));

    // Two chats that send before the same boundary: the first message waits for the second.
    chat_loop::block_on(output(&mut busy)).unwrap();
    first.state().pairs = false;
    let frames = || stage.links[0].sender.stats().frames_sent;
    let before = frames();
    chat_loop::block_on(async {
        busy.submit(Rows::at(1, &row(7)), cancel).await;
        assert_eq!((frames(), first.state().steps), (before, 2));
        keen.submit(Rows::at(1, &row(7)), cancel).await;
        assert_eq!((frames(), first.state().steps), (before, 2));
        chat_loop::boundary().await;
        assert_eq!(frames(), before + 2);
    });
    stage.until("the rows were not sent", || first.state().steps == 4);
    let (one, other) = chat_loop::block_on(join(output(&mut busy), output(&mut keen)));
    assert!(one.is_ok() && one == other);
    drop((busy, keen));
    stage.until_empty();
}

#[test]
fn rows_are_written_when_their_submission_ends_and_not_when_their_output_is_awaited() {
    let stage = Stage::new(&[(0, 3)]);
    let mut backend = stage.open();
    let frames = || stage.links[0].sender.stats().frames_sent;
    let (before, rows) = (frames(), row(5));
    chat_loop::block_on(backend.submit(Rows::at(0, &rows), &stage.cancel));
    assert_eq!(frames(), before + 1);
}

#[test]
fn chats_on_one_loop_go_their_own_ways_through_failures() {
    let stage = Stage::new(&HALVES);
    let node = stage.runs(&stage.open(), 1).node();
    stage.until_empty();
    stage.host(&node).at(4, Deed::Preempt);
    stage.host(&node).at(6, Deed::Die);
    let mut chats: Vec<_> = (0..4).map(|_| stage.open()).collect();
    let cancel = &stage.cancel;
    let answers = chats.iter_mut().map(async |backend| {
        backend.begin_call(0);
        let (mut rows, mut outputs) = (row(5), Vec::new());
        for position in 0..10 {
            backend.submit(Rows::at(position, &rows), cancel).await;
            let notify = &mut |_| {};
            let out = backend.output(&mut Run { cancel, notify }).await?;
            outputs.push(out[0] as u32);
            rows = row(out[0] as u32);
        }
        Ok::<_, ChatError>(outputs)
    });
    let expected = undisturbed(&[(&[5], 9)]);
    for outputs in chat_loop::block_on(join_all(answers)) {
        assert_eq!(outputs.as_ref(), Ok(&expected));
    }
    drop(chats);
    stage.until_empty();
}
