use std::sync::Arc;
use std::time::Duration;

use hearthnet_engine::{Embedder, Head};
use hearthnet_files::ModelFile;
use hearthnet_files::sampling::SamplerConfig;
use hearthnet_testkit::{TinyLlama, family, one_thread};
use hearthnet_tokens::{Detokenizer, Grammar};
use parking_lot::Mutex;

use super::prepared::room_for;
use super::*;
use crate::backend::Output;
use crate::backend::local::{LocalBackend, SharedEngine};
use crate::backend::private_layers::PrivateLayers;
use crate::tests::{engine as engine_of, request, text, tiny};

#[test]
fn a_prompt_that_fills_the_context_still_gets_one_token() {
    assert_eq!(room_for(&[0; 8], 8, Some(100)), Ok(1));
    assert_eq!(room_for(&[0; 5], 8, Some(2)), Ok(2));
    assert!(room_for(&[0; 9], 8, Some(1)).is_err());
    assert_eq!(room_for(&[0; 1], 8, Some(0)), Ok(0));
}

#[test]
fn without_a_limit_an_answer_may_fill_the_context() {
    assert_eq!(room_for(&[0; 8], 8, None), Ok(1));
    assert_eq!(room_for(&[0; 1], 8, None), Ok(8));
    assert!(room_for(&[0; 9], 8, None).is_err());
}

#[test]
fn the_progress_of_a_prompt_is_told_a_few_times_a_second() {
    let start = Instant::now();
    let mut last = start;
    let at = |ms| start + Duration::from_millis(ms);
    let told = (0..1000).filter(|ms| is_due(&mut last, at(*ms))).count();
    assert_eq!(told, 4, "at 200, 400, 600 and 800 ms");
    assert!(!is_due(&mut { start }, at(199)));
}

#[test]
fn a_limit_never_leaves_half_a_character() {
    let (mut cut, tokenizer) = (0, tiny().2.tokenizer);
    for seed in 0..64 {
        let (_, done) = asked(&[], seed, 5);
        if done.finish_reason != FinishReason::Length {
            continue;
        }
        let mut detokenizer = Detokenizer::new(&tokenizer);
        let whole: String = done
            .token_ids
            .iter()
            .map(|id| detokenizer.push(*id))
            .collect();
        cut += usize::from(!detokenizer.finish().is_empty());
        assert_eq!(done.text, whole);
    }
    assert!(cut > 0, "no character was cut: this shows nothing");
}

#[test]
fn frames_are_tagged_with_event_and_data() {
    let frame = Frame::ShardStatus {
        shard_id: "m:0-1".into(),
        host: None,
        status: "ready".into(),
        code: None,
        arithmetic: None,
    };
    assert_eq!(
        serde_json::to_value(&frame).unwrap(),
        serde_json::json!({"event": "shard_status", "data": {"shard_id": "m:0-1", "status": "ready"}})
    );
}

/// Events in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// Number of rows submitted.
    Submitted(usize),
    /// A token frame was sent.
    Told,
}

/// Backend that records its calls.
struct Noting {
    inner: LocalBackend,
    width: usize,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Backend for Noting {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        let count = rows.values.len() / self.width;
        self.events.lock().push(Event::Submitted(count));
        self.inner.submit(rows, cancel)
    }
    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.inner.output(run)
    }
    fn inner(&self) -> Option<&dyn Backend> {
        Some(&self.inner)
    }
    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        Some(&mut self.inner)
    }
}

/// Events while a tiny model answers, and the answer.
fn asked(stop: &[&str], seed: u64, tokens: u32) -> (Vec<Event>, Done) {
    let (file, engine, model) = tiny();
    let width = file.spec().width as usize;
    let events = Arc::new(Mutex::new(Vec::new()));
    let mut conversation = Conversation::new(Box::new(Noting {
        inner: engine.open().unwrap(),
        width,
        events: Arc::clone(&events),
    }));
    let request = ChatRequest {
        sampling: SamplerConfig {
            temperature: 1.5,
            seed: Some(seed),
            ..SamplerConfig::default()
        },
        stop: stop.iter().map(|&text| text.to_owned()).collect(),
        ..request(Prompt::Tokens(vec![10, 11, 12]), tokens)
    };
    let done = conversation.answer(
        &model,
        &request,
        Instant::now(),
        &Cancel::default(),
        &mut |frame| {
            if let Frame::TokenDelta { .. } = frame {
                events.lock().push(Event::Told);
            }
        },
    );
    let events = events.lock().clone();
    (events, done.unwrap())
}

#[test]
fn a_token_is_on_its_way_before_it_is_told_and_the_last_one_stays() {
    let (mut events, done) = asked(&[], 3, 12);
    // The text held back to the end has a frame of its own.
    events.truncate(2 * done.token_ids.len());
    let mut expected = vec![Event::Submitted(3)];
    for _ in 1..done.token_ids.len() {
        expected.extend([Event::Submitted(1), Event::Told]);
    }
    expected.push(Event::Told);
    assert_eq!(events, expected);
    assert_eq!(done.usage.completion_tokens as usize, done.token_ids.len());
}

#[test]
fn nothing_is_run_behind_a_stop_text() {
    let (_, whole) = asked(&[], 3, 12);
    let at = whole.text.char_indices().nth(2).map(|(at, _)| at);
    let stop = &whole.text[at.expect("some text")..];
    let stop: String = stop.chars().take(1).collect();
    let (events, done) = asked(&[&stop], 3, 12);
    assert_eq!(done.finish_reason, FinishReason::Stop);
    assert!(done.token_ids.len() < whole.token_ids.len());
    let sent = events.iter().filter(|e| **e != Event::Told).count();
    assert_eq!(
        sent,
        done.token_ids.len(),
        "the prompt, and all tokens but the last"
    );
}

/// Answer of a tiny model, which says anything, with a grammar.
fn by(grammar: Grammar, seed: u64, tokens: u32) -> Result<Done, ChatError> {
    let (_, engine, model) = tiny();
    let mut conversation = Conversation::new(Box::new(engine.open().unwrap()));
    let request = ChatRequest {
        sampling: SamplerConfig {
            temperature: 1.5,
            seed: Some(seed),
            ..SamplerConfig::default()
        },
        grammar: Some(grammar),
        ..request(Prompt::Tokens(vec![10, 11, 12]), tokens)
    };
    let (now, cancel) = (Instant::now(), Cancel::default());
    conversation.answer(&model, &request, now, &cancel, &mut |_| {})
}

#[test]
fn an_answer_follows_its_grammar_and_ends_with_it() {
    for seed in 0..8 {
        let digits = by(Grammar::Regex("[0-9]{4}".into()), seed, 50).unwrap();
        assert_eq!(digits.finish_reason, FinishReason::Stop);
        let text = &digits.text;
        assert!(
            text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_digit()),
            "{text}"
        );
        // The last token ends the turn.
        assert_eq!(digits.token_ids.len(), 5);
        let cut = by(Grammar::Regex("[0-9]{4}".into()), seed, 3).unwrap();
        assert_eq!(cut.finish_reason, FinishReason::Length);
        assert_eq!(cut.text, &text[..3]);
    }
}

#[test]
fn a_refused_grammar_is_an_error_that_blames_no_host() {
    let refused = by(Grammar::Regex("(".into()), 1, 4).unwrap_err();
    assert!(matches!(refused, ChatError::Grammar(_)), "{refused:?}");
    assert!(!refused.blames_host());
    // No token has the byte 0xff, which no text in UTF-8 has.
    let bytes = "%llguidance {\"allow_invalid_utf8\": true}\nstart: /(?-u:\\xff)/";
    let stuck = by(Grammar::Lark(bytes.into()), 1, 4).unwrap_err();
    assert!(matches!(stuck, ChatError::Grammar(_)), "{stuck:?}");
}

#[test]
fn a_prompt_without_the_last_answer_goes_on_from_a_checkpoint_of_recurrent_layers() {
    let model = TinyLlama {
        recurrent: true,
        context: 512,
        ..TinyLlama::default()
    };
    let file = model.file();
    let engine = engine_of(&file, 0..file.spec().layers);
    let model = text(&file, Head::load(&file, &one_thread()).unwrap());
    let begun = || Conversation::new(Box::new(engine.open().unwrap()));
    let answer = |conversation: &mut Conversation, prompt: &[u32]| {
        let request = request(Prompt::Tokens(prompt.to_vec()), 40);
        let cancel = Cancel::default();
        let done = conversation.answer(&model, &request, Instant::now(), &cancel, &mut |_| ());
        done.unwrap()
    };
    let prompt: Vec<u32> = (0..300).map(|n| n * 7 % 250).collect();
    let mut conversation = begun();
    let first = answer(&mut conversation, &prompt);
    let other = (first.token_ids[0] + 1) % 250;
    let next = [&prompt[..], &[other, 5, 6]].concat();
    let second = answer(&mut conversation, &next);
    // Checkpoints lie at multiples of 64 positions.
    assert_eq!(
        (first.usage.cached_tokens, second.usage.cached_tokens),
        (0, 256)
    );
    assert_eq!(second.token_ids, answer(&mut begun(), &next).token_ids);
}

/// Backend whose hosts are replaced by others with another arithmetic.
struct Moving {
    inner: LocalBackend,
    arithmetic: &'static str,
    /// Number of outputs before the replacement, and the new arithmetic.
    moves: Option<(usize, &'static str)>,
}

impl Backend for Moving {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        self.inner.submit(rows, cancel)
    }
    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        match &mut self.moves {
            Some((0, to)) => {
                let of = |name: &str| Arithmetics::from_iter([name.to_owned()]);
                (run.notify)(Frame::ShardFailover {
                    shard_id: "m:0-1".into(),
                    host: Some("gone".into()),
                    code: hearthnet_transport::Code::CONNECTION_LOST,
                    replacements: vec!["there".into()],
                    replayed: 0,
                    recovery_ms: 0.0,
                    arithmetic: Some((of(self.arithmetic), of(to))),
                });
                self.arithmetic = to;
                self.moves = None;
            }
            Some((left, _)) => *left -= 1,
            None => {}
        }
        self.inner.output(run)
    }
    fn route(&self) -> Vec<RouteHop> {
        let mut route = self.inner.route();
        for hop in &mut route {
            hop.arithmetic = self.arithmetic.into();
        }
        route
    }
}

#[test]
fn an_answer_names_the_arithmetics_of_itself_and_of_its_cached_prefix() {
    let (_, engine, model) = tiny();
    let (exact, other) = ("canonical-1", "torch-cpu-fp32");
    let cases: [(_, _, &[&str]); 5] = [
        (exact, None, &[exact]),
        (other, None, &[other]),
        // During the prefill, and in the middle of the answer.
        (other, Some((0, exact)), &[exact, other]),
        (other, Some((3, exact)), &[exact, other]),
        (exact, Some((3, other)), &[exact, other]),
    ];
    for (arithmetic, moves, made) in cases {
        let mut conversation = Conversation::new(Box::new(Moving {
            inner: engine.open().unwrap(),
            arithmetic,
            moves,
        }));
        let mut ask = |prompt: Vec<u32>| {
            let request = request(Prompt::Tokens(prompt), 6);
            let (now, cancel) = (Instant::now(), Cancel::default());
            let done = conversation.answer(&model, &request, now, &cancel, &mut |_| {});
            serde_json::to_value(done.unwrap().arithmetic).unwrap()
        };
        assert_eq!(ask(vec![10, 11, 12]), serde_json::json!(made));
        // The next turn reuses the held tokens.
        assert_eq!(ask(vec![10, 11, 12, 13]), serde_json::json!(made));
        // This prompt reuses none.
        let now = moves.map_or(arithmetic, |(_, to)| to);
        assert_eq!(ask(vec![20, 11]), serde_json::json!([now]));
    }
}

const LAYERS: u32 = 6;

/// Model that reads texts of several pieces, and the caller's side of it.
fn long() -> (ModelFile, TextModel) {
    let model = TinyLlama {
        layers: LAYERS,
        context: 700,
        ..TinyLlama::default()
    };
    let file = model.file();
    let head = Head::load(&file, &one_thread()).unwrap();
    let model = text(&file, head);
    (file, model)
}

/// Token ids of a text.
fn ids(count: u32) -> Vec<u32> {
    (0..count).map(|n| 3 + n * 7 % 250).collect()
}

/// Vectors of texts, one after the other in one conversation, and the counts of the last one.
fn embedded(
    backend: Box<dyn Backend>,
    model: &TextModel,
    texts: &[Vec<u32>],
) -> Result<(Vec<Embedding>, Usage), ChatError> {
    let mut conversation = Conversation::new(backend);
    let (mut vectors, mut usage) = (Vec::new(), None);
    for ids in texts {
        let mut call = Call {
            model,
            started: Instant::now(),
            cancel: &Cancel::default(),
            listener: &mut AtOnce(&mut |_| {}),
        };
        let text = Prepared::embedding(model, ids)?;
        let done = chat_loop::block_on(conversation.answer_to(text, &mut call))?;
        assert_eq!((done.text.as_str(), done.token_ids.len()), ("", 0));
        vectors.push(done.embedding.expect("a vector"));
        usage = Some(done.usage);
    }
    Ok((vectors, usage.expect("a text")))
}

/// Bits of vectors.
fn bits(vectors: &[Embedding]) -> Vec<Vec<u32>> {
    let bits = |vector: &Embedding| vector.0.iter().map(|value| value.to_bits()).collect();
    vectors.iter().map(bits).collect()
}

#[test]
fn a_vector_has_the_same_bits_for_every_cut_and_beside_other_texts() {
    let (file, model) = long();
    let texts = [ids(5), ids(600), ids(1), ids(30)];
    let whole = engine_of(&file, 0..LAYERS);
    let mut expected = Vec::new();
    for text in &texts {
        let alone = [text.clone()];
        let (vectors, usage) = embedded(Box::new(whole.open().unwrap()), &model, &alone).unwrap();
        let count = text.len() as u32;
        assert_eq!((usage.prompt_tokens, usage.total_tokens), (count, count));
        assert_eq!((usage.completion_tokens, usage.cached_tokens), (0, 0));
        expected.extend(bits(&vectors));
    }
    assert_eq!(expected[0].len(), 64);
    assert!(expected.windows(2).all(|two| two[0] != two[1]));
    for (first, last) in [(0, 0), (2, 0), (0, 1), (2, 1), (3, 2)] {
        let private = PrivateLayers::load(&file, "tiny", (first, last), 24, &one_thread());
        let private = private.unwrap();
        let middle = engine_of(&file, private.hosted()).open().unwrap();
        let backend = private.around(Box::new(middle)).unwrap();
        let (vectors, _) = embedded(backend, &model, &texts).unwrap();
        assert_eq!(bits(&vectors), expected, "{first} first, {last} last");
    }
}

#[test]
fn an_encoder_gives_the_vectors_of_a_local_program_and_continues_no_text() {
    for name in ["bert", "gemmaembedding", "nomicbert"] {
        let file = family(name);
        let vocab = file.spec().vocab;
        // Longer than a piece of other models, where the context allows.
        let longest = file.spec().context.min(300);
        let texts = [1, 7, longest].map(|count| (0..count).map(|n| n * 5 % vocab).collect());
        let texts: [Vec<u32>; 3] = texts;
        let mut embedder = Embedder::load(&file, &one_thread(), &mut |_, _| {}).unwrap();
        let expected = texts.each_ref().map(|ids| embedder.embed(ids).unwrap());
        // The tokenizer is another model's: the texts are token ids.
        let (_, _, text) = tiny();
        let model = TextModel {
            pooling: file.pooling(),
            head: Head::load(&file, &one_thread()).unwrap().into(),
            context: file.spec().context,
            ..text
        };
        let whole = engine_of(&file, 0..file.spec().layers);
        let backend = Box::new(whole.open().unwrap());
        let (vectors, usage) = embedded(backend, &model, &texts).unwrap();
        let vectors: Vec<&Vec<f32>> = vectors.iter().map(|vector| &vector.0).collect();
        assert_eq!(vectors, expected.iter().collect::<Vec<_>>(), "{name}");
        assert_eq!(usage.prompt_tokens, longest, "{name}");
        let ask = request(Prompt::Tokens(vec![1, 2]), 4);
        let refused = Prepared::new(&model, &ask).err().unwrap();
        assert_eq!(refused.code(), "bad_request");
        assert!(refused.to_string().contains("/v1/embeddings"), "{refused}");
    }
}

/// Backend that is replaced at an output by another engine, which computes all rows again and
/// returns them, as [`WithFallback`](crate::fallback::WithFallback) does.
struct Replaced {
    inner: LocalBackend,
    engine: SharedEngine,
    /// Rows since the start of the sequence.
    rows: Vec<f32>,
    width: usize,
    /// Outputs before the replacement.
    left: usize,
}

impl Backend for Replaced {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        self.rows.truncate(rows.position as usize * self.width);
        self.rows.extend_from_slice(rows.values);
        self.inner.submit(rows, cancel)
    }
    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        async {
            let is_lost = self.left == 0;
            self.left = self.left.wrapping_sub(1);
            if is_lost {
                self.inner = self.engine.open()?;
                let all = Rows {
                    all: true,
                    ..Rows::at(0, &self.rows)
                };
                self.inner.submit(all, run.cancel).await;
            }
            self.inner.output(run).await
        }
        .boxed_local()
    }
}

#[test]
fn a_failover_in_the_middle_of_a_text_changes_no_bit_of_its_vector() {
    let (file, model) = long();
    let texts = [ids(10), ids(600), ids(300)];
    let whole = engine_of(&file, 0..LAYERS);
    let undisturbed = Box::new(whole.open().unwrap());
    let (expected, _) = embedded(undisturbed, &model, &texts).unwrap();
    // The texts have 1, 3 and 2 pieces.
    for left in 0..6 {
        let replaced = Replaced {
            inner: whole.open().unwrap(),
            engine: engine_of(&file, 0..LAYERS),
            rows: Vec::new(),
            width: 64,
            left,
        };
        let (vectors, _) = embedded(Box::new(replaced), &model, &texts).unwrap();
        assert_eq!(bits(&vectors), bits(&expected), "after {left} outputs");
    }
}

#[test]
fn a_text_to_embed_fits_the_context_or_is_cut_and_is_not_empty() {
    let (_, model) = long();
    let tokens = |text: Prompt, truncate: bool| tokens_of(&model, &text, truncate);
    let long = Prompt::Tokens(ids(701));
    assert_eq!(tokens(long.clone(), true), Ok(ids(700)));
    let error = ChatError::TooLong {
        tokens: 701,
        context: 700,
    };
    assert_eq!(tokens(long, false), Err(error));
    assert_eq!(tokens(Prompt::Tokens(ids(700)), false), Ok(ids(700)));
    let empty = Prompt::Tokens(Vec::new());
    for invalid in [
        empty,
        Prompt::Tokens(vec![3, 320]),
        Prompt::Messages(Vec::new()),
    ] {
        let refused = tokens(invalid, true).unwrap_err();
        assert_eq!(refused.code(), "bad_request");
    }
}
