//! Copies of a sequence that continue by themselves, and outputs of all rows.

use futures_util::future::join_all;

use super::*;

/// Rows behind the prompt, per branch.
const MORE: usize = 7;

/// Continues behind [`PROMPT`] with a row of `first`, then with each output.
async fn branch(
    backend: &mut dyn Backend,
    first: u32,
    cancel: &Cancel,
) -> Result<Vec<u32>, ChatError> {
    let (mut rows, mut outputs) = (row(first), Vec::new());
    for position in (PROMPT.len() as u32..).take(MORE) {
        backend.submit(Rows::at(position, &rows), cancel).await;
        let notify = &mut |_| {};
        let out = backend.output(&mut Run { cancel, notify }).await?;
        outputs.push(out[0] as u32);
        rows = row(out[0] as u32);
    }
    Ok(outputs)
}

/// Runs [`PROMPT`], forks three copies, calls `then`, and continues all four differently. Each must
/// have the outputs of a sequence of its own.
fn continue_differently(stage: &Stage, then: impl FnOnce(&ShardedBackend)) {
    let mut source = stage.open();
    source.begin_call(0);
    run_quietly(&mut source, 0, &rows(&PROMPT), &stage.cancel).unwrap();
    let outputs = chat_loop::block_on(async {
        let mut copies = Vec::new();
        for _ in 0..3 {
            copies.push(source.fork().await.expect("a copy"));
        }
        then(&source);
        let mut all: Vec<&mut dyn Backend> = vec![&mut source];
        all.extend(
            copies
                .iter_mut()
                .map(|copy| copy.as_mut() as &mut dyn Backend),
        );
        let all = all.into_iter().zip(20..);
        join_all(all.map(|(backend, first)| branch(backend, first, &stage.cancel))).await
    });
    for (first, outputs) in (20..).zip(outputs) {
        let expected = undisturbed(&[(&PROMPT, 0), (&[first], MORE as u32 - 1)]);
        assert_eq!(outputs.as_deref(), Ok(&expected[1..]), "{first}");
    }
    drop(source);
    stage.until_empty();
}

#[test]
fn copies_run_the_prompt_no_second_time() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    continue_differently(&stage, |_| {});
    for host in &stage.hosts {
        // The prompt has three steps of three rows at most.
        assert_eq!(host.state().steps as usize, 3 + 4 * MORE);
    }
    stage.all_are_good();
}

#[test]
fn hosts_that_refuse_a_fork_or_do_not_know_it_get_the_rows_again() {
    let stage = Stage::new(&[(0, 1), (2, 3)]);
    stage.hosts[1].state().refused_forks = vec!["kv_full", "unknown_stream"];
    continue_differently(&stage, |_| {});
    stage.all_are_good();

    let exact = [((0, 1), ARITHMETIC), ((2, 3), ARITHMETIC)];
    let stage = Stage::with_software(&exact, "puppet/1");
    continue_differently(&stage, |_| {});
    stage.all_are_good();
}

#[test]
fn no_branch_loses_a_row_if_a_host_of_all_fails() {
    for deed in [Deed::Die, Deed::Leave] {
        let stage = Stage::new(&HALVES);
        continue_differently(&stage, |source| {
            let host = stage.runs(source, 1).node();
            stage.host(&host).at(10, deed);
        });
    }
}

#[test]
fn all_rows_come_back_once_if_wanted_despite_failures() {
    let expected = PROMPT.map(honest(0..LAYERS));
    for span in [0, 1] {
        for deed in [Deed::Die, Deed::Leave, Deed::Preempt] {
            let stage = Stage::new(&HALVES);
            let mut backend = stage.open();
            let host = stage.runs(&backend, span).node();
            stage.host(&host).at(4, deed);
            backend.begin_call(0);
            let out = run_all(&mut backend, &rows(&PROMPT), &stage.cancel).unwrap();
            let firsts = out.chunks_exact(WIDTH).map(|row| row[0] as u32);
            assert_eq!(firsts.collect::<Vec<_>>(), expected, "{deed:?} at {span}");
        }
    }
}
