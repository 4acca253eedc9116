use std::sync::Barrier;

use futures_util::future::join_all;
use hearthnet_testkit::{family, one_thread};
use hearthnet_transport::Code;

use super::*;
use crate::backend::tests::run_quietly;
use crate::steps::chat_loop::block_on;
use crate::tests::{engine, tiny_file};

const LAYERS: u32 = 6;

fn tiny() -> ModelFile {
    tiny_file(LAYERS)
}

fn ends(file: &ModelFile, first: u32, last: u32) -> PrivateLayers {
    PrivateLayers::load(file, "tiny", (first, last), 3, &one_thread()).unwrap()
}

/// Embeddings of `count` tokens.
fn rows(file: &ModelFile, seed: u32, count: u32) -> Vec<f32> {
    embedded(file, (0..count).map(|n| (seed * 31 + n * 7) % 250 + 3))
}

fn embedded(file: &ModelFile, ids: impl Iterator<Item = u32>) -> Vec<f32> {
    let head = Head::load(file, &one_thread()).unwrap();
    let mut rows = Vec::new();
    head.embed(&ids.collect::<Vec<_>>(), &mut rows).unwrap();
    rows
}

/// The private layers around an engine with the others.
fn around(file: &ModelFile, private: &PrivateLayers) -> Box<dyn Backend> {
    let between = engine(file, private.hosted()).open().unwrap();
    private.around(Box::new(between)).unwrap()
}

fn run(backend: &mut dyn Backend, position: u32, rows: &[f32]) -> Result<Vec<u32>, ChatError> {
    let out = run_quietly(backend, position, rows, &Cancel::default())?;
    Ok(out.iter().map(|value| value.to_bits()).collect())
}

/// A prompt, three tokens, and a next turn that goes back into the prompt.
fn conversation(backend: &mut dyn Backend, file: &ModelFile, seed: u32) -> Vec<Vec<u32>> {
    backend.begin_call(0);
    let mut outputs = vec![run(backend, 0, &rows(file, seed, 29)).unwrap()];
    for token in 0..3 {
        outputs.push(run(backend, 29 + token, &rows(file, seed + token + 1, 1)).unwrap());
    }
    backend.end_call();
    backend.begin_call(0);
    outputs.push(run(backend, 17, &rows(file, seed + 9, 11)).unwrap());
    outputs.push(run(backend, 28, &rows(file, seed + 10, 1)).unwrap());
    backend.end_call();
    outputs
}

#[test]
fn the_number_of_private_layers_does_not_change_the_output() {
    let file = tiny();
    let whole = engine(&file, 0..LAYERS);
    let expected = conversation(&mut whole.open().unwrap(), &file, 1);
    for first in [0, 1, 2, 5] {
        for last in [0, 1, 3] {
            if first + last >= LAYERS {
                continue;
            }
            let private = ends(&file, first, last);
            assert_eq!(private.hosted(), first..LAYERS - last);
            let mut backend = around(&file, &private);
            let got = conversation(backend.as_mut(), &file, 1);
            assert_eq!(got, expected, "{first} first, {last} last");
            let route: Vec<(u32, u32)> = backend.route().iter().map(|hop| hop.layers).collect();
            assert_eq!(route.len(), backend.times().len());
            assert_eq!(route.first().unwrap().0, 0);
            assert_eq!(route.last().unwrap().1, LAYERS - 1);
            assert!(route.windows(2).all(|two| two[0].1 + 1 == two[1].0));
        }
    }
}

/// Layers between, which return wrong rows at first, and then all rows again.
struct Redone {
    inner: LocalBackend,
    rows: Vec<f32>,
}

impl Backend for Redone {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        self.inner.submit(rows, cancel)
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        let out = async move {
            let is_first = self.rows.is_empty();
            self.rows.extend(self.inner.output(run).await?);
            Ok(match is_first {
                true => self.rows.iter().map(|value| value * 2.0).collect(),
                false => self.rows.clone(),
            })
        };
        out.boxed_local()
    }
}

#[test]
fn after_wrong_rows_the_last_layers_run_all_rows_again() {
    let file = tiny();
    let mut whole = engine(&file, 0..LAYERS).open().unwrap();
    let private = ends(&file, 1, 2);
    let between = Redone {
        inner: engine(&file, private.hosted()).open().unwrap(),
        rows: Vec::new(),
    };
    let mut backend = private.around(Box::new(between)).unwrap();
    let (prompt, token) = (rows(&file, 1, 70), rows(&file, 2, 1));
    whole.begin_call(0);
    backend.begin_call(0);
    let right = run(&mut whole, 0, &prompt).unwrap();
    assert_ne!(run(backend.as_mut(), 0, &prompt).unwrap(), right);
    let right = run(&mut whole, 70, &token).unwrap();
    assert_eq!(run(backend.as_mut(), 70, &token).unwrap(), right);
}

#[test]
fn recurrent_layers_go_back_to_a_common_checkpoint_and_on_with_the_same_bits() {
    let file = family("qwen35");
    let layers = file.spec().layers;
    let rows = |seed: u32, count: u32| {
        embedded(
            &file,
            (0..count).map(|n| (seed + n * 7) % file.spec().vocab),
        )
    };
    let width = file.spec().width as usize;
    let (prompt, next) = (rows(1, 200), rows(5, 20));
    // The first 150 positions of the prompt, and others behind them.
    let other = [&prompt[..150 * width], &next].concat();
    let whole = engine(&file, 0..layers);
    let expected = run(&mut whole.open().unwrap(), 0, &other).unwrap();
    for (first, last) in [(0, 0), (2, 0), (1, 2)] {
        let private = ends(&file, first, last);
        let mut backend = around(&file, &private);
        backend.begin_call(0);
        run(backend.as_mut(), 0, &prompt).unwrap();
        run(backend.as_mut(), 200, &rows(9, 1)).unwrap();
        // The last step can be taken back.
        assert_eq!(block_on(backend.rewind(200)), Ok(200));
        let left = block_on(backend.rewind(150)).unwrap();
        assert_eq!(left, 128, "{first} first, {last} last");
        let rest = &other[left as usize * width..];
        assert_eq!(run(backend.as_mut(), left, rest).unwrap(), expected);
    }
}

#[test]
fn layer_inputs_reach_the_layers_behind_private_ones() {
    let file = family("gemma4ple");
    let layers = file.spec().layers;
    let (prompt, next) = (embedded(&file, 0..40), embedded(&file, 50..51));
    assert_eq!(prompt.len(), 40 * (32 + 6 * 32));
    let whole = engine(&file, 0..layers);
    let mut undisturbed = whole.open().unwrap();
    let expected = [(0, &prompt), (40, &next)].map(|(at, rows)| run(&mut undisturbed, at, rows));
    for first in [1, 2] {
        let private = ends(&file, first, 0);
        let mut backend = around(&file, &private);
        backend.begin_call(0);
        let got = [(0, &prompt), (40, &next)].map(|(at, rows)| run(backend.as_mut(), at, rows));
        assert_eq!(got, expected, "{first} private layers");
    }
    let last = PrivateLayers::load(&file, "tiny", (1, 1), 3, &one_thread());
    assert!(matches!(last, Err(LoadError::Unsupported(_))));
}

#[test]
fn a_fork_continues_like_its_source_and_both_are_independent() {
    let file = tiny();
    let private = ends(&file, 2, 1);
    let between = engine(&file, private.hosted());
    let begun = || {
        let inner = between.open().unwrap();
        let mut backend = private.around(Box::new(inner)).unwrap();
        backend.begin_call(0);
        run(backend.as_mut(), 0, &rows(&file, 1, 29)).unwrap();
        backend
    };
    let next = rows(&file, 2, 1);
    let expected = run(begun().as_mut(), 29, &next).unwrap();
    let mut source = begun();
    let mut fork = block_on(source.fork()).expect("there is room");
    assert_eq!(run(fork.as_mut(), 29, &next).unwrap(), expected);
    run(source.as_mut(), 29, &rows(&file, 3, 1)).unwrap();
    assert_eq!(run(fork.as_mut(), 29, &next).unwrap(), expected);
}

#[test]
fn chats_that_share_private_layers_get_unchanged_results() {
    const CHATS: u32 = 6;
    let file = tiny();
    let whole = engine(&file, 0..LAYERS);
    let private = ends(&file, 2, 1);
    let between = engine(&file, private.hosted());
    let together = Barrier::new(CHATS as usize);
    std::thread::scope(|scope| {
        for chat in 0..CHATS {
            let (file, whole, private, between) = (&file, &whole, &private, &between);
            let together = &together;
            scope.spawn(move || {
                let alone: &mut LocalBackend = &mut whole.open().unwrap();
                let expected = conversation(alone, file, chat);
                for _ in 0..4 {
                    let inner = between.open().unwrap();
                    let mut backend = private.around(Box::new(inner)).unwrap();
                    together.wait();
                    assert_eq!(conversation(backend.as_mut(), file, chat), expected);
                }
            });
        }
    });
    for end in private.first.iter().chain(&private.last) {
        assert!(end.0.batcher.is_idle());
        let left = end
            .0
            .with(|engine| (engine.sequences(), engine.kv_bytes_in_use()));
        assert_eq!(left, Ok((0, 0)));
    }
}

#[test]
fn a_row_that_cannot_be_computed_fails_its_own_chat_only() {
    let file = tiny();
    let private = ends(&file, 2, 0);
    let first = private.first.as_ref().unwrap();
    let good = rows(&file, 1, 1);
    let mut bad = good.clone();
    bad[3] = f32::NAN;
    let mut chats = [(); 3].map(|()| first.open().unwrap());
    chats.iter_mut().for_each(|chat| chat.begin_call(0));
    let cancel = Cancel::default();
    let jobs = chats.iter_mut().zip([&good, &bad, &good]);
    let jobs = jobs.map(|(chat, rows)| chat.rows(0, rows.clone(), true, &cancel));
    let done = block_on(join_all(jobs));
    assert!(done[0].is_ok());
    assert_eq!(done[0], done[2]);
    assert!(matches!(done[1], Err(ChatError::Engine(_))));
}

#[test]
fn a_conversation_too_many_is_refused_as_busy_and_room_comes_back() {
    let file = tiny();
    let options = EngineOptions {
        max_sequences: 1,
        ..one_thread()
    };
    let private = PrivateLayers::load(&file, "tiny", (1, 1), 3, &options).unwrap();
    let between = engine(&file, private.hosted());
    let open = || private.around(Box::new(between.open().unwrap()));
    let first = open().unwrap();
    assert_eq!(open().err().map(|e| e.code()), Some(Code::BUSY));
    drop(first);
    assert!(open().is_ok());
}

#[test]
fn a_cancelled_chat_computes_no_further_chunk() {
    let file = tiny();
    let private = ends(&file, 2, 0);
    let mut backend = around(&file, &private);
    let cancel = Cancel::default();
    cancel.cancel();
    let output = run_quietly(backend.as_mut(), 0, &rows(&file, 1, 20), &cancel);
    assert_eq!(output, Err(ChatError::Cancelled));
    let first = private.first.as_ref().unwrap();
    let kv_bytes = first.0.with(|engine| engine.kv_bytes_in_use());
    assert_eq!(kv_bytes, Ok(0), "nothing was computed");
}

#[test]
fn something_must_be_left_for_hosts() {
    let file = tiny();
    for (first, last) in [(LAYERS, 0), (4, 2), (0, LAYERS), (u32::MAX, 1)] {
        let loaded = PrivateLayers::load(&file, "tiny", (first, last), 3, &one_thread());
        assert!(
            matches!(loaded, Err(LoadError::Layers { .. })),
            "{first}, {last}"
        );
    }
    assert_eq!(PrivateLayers::none(LAYERS).hosted(), 0..LAYERS);
}
