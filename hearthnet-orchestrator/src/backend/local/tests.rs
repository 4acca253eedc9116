use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_util::future::join_all;

use super::*;
use crate::backend::tests::{run_all, run_quietly};
use crate::steps::chat_loop::block_on;

const PROMPT: usize = 40;

/// Engine, and the embedded rows of a prompt.
fn tiny() -> (SharedEngine, Vec<f32>) {
    let (_, engine, text) = crate::tests::tiny();
    let ids: Vec<u32> = (0..PROMPT as u32).map(|n| 3 + n % 7).collect();
    let mut rows = Vec::new();
    text.head.embed(&ids, &mut rows).unwrap();
    (engine, rows)
}

fn run(backend: &mut LocalBackend, rows: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ChatError> {
    run_quietly(backend, 0, rows, cancel)
}

#[test]
fn a_fork_continues_like_a_sequence_with_the_same_rows() {
    let (engine, rows) = tiny();
    let cancel = Cancel::default();
    let next = |backend: &mut LocalBackend, row: &[f32]| {
        run_quietly(backend, PROMPT as u32, row, &cancel).unwrap()
    };
    let mut source = engine.open().unwrap();
    source.begin_call(0);
    run(&mut source, &rows, &cancel).unwrap();
    let mut fork = block_on(source.forked()).expect("there is room");
    let width = engine.0.shape.width as usize;
    let [one, other] = [&rows[..width], &rows[width..2 * width]];
    let outputs = [next(&mut fork, one), next(&mut source, other)];
    let alone = [one, other].map(|row| {
        let mut backend = engine.open().unwrap();
        run(&mut backend, &rows, &cancel).unwrap();
        next(&mut backend, row)
    });
    assert_eq!(outputs, alone);
    drop((source, fork));
    assert_eq!(engine.0.with(|engine| engine.sequences()).unwrap(), 0);
}

#[test]
fn all_rows_come_back_if_wanted() {
    let (engine, rows) = tiny();
    let cancel = Cancel::default();
    let width = engine.0.shape.width as usize;
    let mut backend = engine.open().unwrap();
    let mut each = Vec::new();
    for (position, row) in (0..).zip(rows.chunks_exact(width)) {
        each.extend(run_quietly(&mut backend, position, row, &cancel).unwrap());
    }
    assert_eq!(run_all(&mut backend, &rows, &cancel).unwrap(), each);
}

#[test]
fn the_cut_of_a_prompt_does_not_change_the_output() {
    let (engine, rows) = tiny();
    let mut outputs = Vec::new();
    for ms_per_row in [0, 5, 15, 1000] {
        let slow = Duration::from_millis(ms_per_row);
        let first = {
            let mut pieces = engine.0.pieces.lock();
            *pieces = ChunkedPrefill::default();
            pieces.note(true, 1, slow);
            pieces.rows(1)
        };
        assert_eq!(first >= PROMPT, ms_per_row == 0);
        let mut backend = engine.open().unwrap();
        outputs.push(run(&mut backend, &rows, &Cancel::default()).unwrap());
    }
    outputs.dedup();
    assert_eq!(outputs.len(), 1);
    assert!(outputs[0].iter().all(|value| value.is_finite()));
}

#[test]
fn a_cancelled_chat_is_not_computed() {
    let (engine, rows) = tiny();
    let mut backend = engine.open().unwrap();
    let cancel = Cancel::default();
    let in_use = engine.0.with(|engine| engine.kv_bytes_in_use()).unwrap();
    std::thread::scope(|scope| {
        let busy = engine.0.batcher.keep_busy();
        let chat = scope.spawn(|| run(&mut backend, &rows, &cancel));
        // The chat is cancelled while its job waits.
        while engine.0.batcher.asking() < 1 {
            std::thread::yield_now();
        }
        cancel.cancel();
        drop(busy);
        assert_eq!(chat.join().unwrap(), Err(ChatError::Cancelled));
    });
    let after = engine.0.with(|engine| engine.kv_bytes_in_use());
    assert_eq!(after.unwrap(), in_use, "nothing was computed for it");
}

#[test]
fn concurrent_chats_run_as_one_batch_with_unchanged_results() {
    let (engine, rows) = tiny();
    let alone = run(&mut engine.open().unwrap(), &rows, &Cancel::default()).unwrap();
    let mut chats = [(); 3].map(|()| engine.open().unwrap());
    chats.iter_mut().for_each(|chat| chat.begin_call(0));
    let asks = chats.iter_mut().map(|chat| async {
        let done = chat.rows(0, rows.clone(), true, &Cancel::default()).await;
        let compute = chat.engine.0.batcher.asking();
        (done.unwrap().split_off(rows.len() - alone.len()), compute)
    });
    let outputs = block_on(join_all(asks));
    // No job is left waiting when the first one is done.
    assert_eq!(outputs, [(); 3].map(|()| (alone.clone(), 0)));
}

#[test]
fn a_panic_loses_the_engine_and_blocks_no_chat() {
    let (engine, rows) = tiny();
    let mut backend = engine.open().unwrap();
    let panics = AssertUnwindSafe(|| engine.0.with(|_| panic!("as told")));
    assert!(catch_unwind(panics).is_err());
    for _ in 0..2 {
        let error = run(&mut backend, &rows, &Cancel::default()).unwrap_err();
        assert!(matches!(error, ChatError::Engine(_)));
    }
}
