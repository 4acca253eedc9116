//! Service over a tiny real model on this machine; the test controls its steps.

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_tokens::ChatMessage;
use hearthnet_transport::Code;
use tokio::runtime::Runtime;

use super::*;
use crate::backend::{Output, RouteHop, Rows, Run};
use crate::chat::{Done, FinishReason, Prompt, PromptToken, check, choice_seed};
use crate::tests::served;

/// Long enough for a loaded machine; reaching it is a failure.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Barrier at every step of every chat, open or shut.
pub(crate) struct Gate(watch::Sender<bool>);

impl Gate {
    pub(crate) fn set(&self, shut: bool) {
        self.0.send_replace(shut);
    }

    async fn pass(&self, cancel: &Cancel) -> Result<(), ChatError> {
        let mut shut = self.0.subscribe();
        let passed = cancel
            .run_until_cancelled(shut.wait_for(|shut| !shut))
            .await;
        passed.map(drop).ok_or(ChatError::Cancelled)
    }
}

/// Backends opened so far, and those still open.
#[derive(Default)]
pub(crate) struct Census {
    pub(crate) opened: usize,
    pub(crate) there: usize,
    /// Maximum number of open backends; more are refused as by full hosts.
    pub(crate) room: usize,
    /// The next backend fails after this many steps.
    pub(crate) fail_after: Option<usize>,
    /// Rules with which backends were opened.
    pub(crate) asked: Vec<Exact>,
    /// Arithmetic that new backends report, if not the true one.
    pub(crate) arithmetic: Option<String>,
}

struct Gated {
    inner: Box<dyn Backend>,
    gate: Arc<Gate>,
    census: Arc<Mutex<Census>>,
    fail_after: Option<usize>,
    arithmetic: Option<String>,
}

impl Backend for Gated {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        self.inner.submit(rows, cancel)
    }
    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        async {
            self.gate.pass(run.cancel).await?;
            match &mut self.fail_after {
                Some(0) => return Err(ChatError::ShardUnavailable("gone".into())),
                Some(left) => *left -= 1,
                None => {}
            }
            self.inner.output(run).await
        }
        .boxed_local()
    }
    fn fork(&mut self) -> LocalBoxFuture<'_, Option<Box<dyn Backend>>> {
        async {
            let has_room = {
                let census = self.census.lock();
                census.there < census.room
            };
            let inner = match has_room {
                true => self.inner.fork().await?,
                false => return None,
            };
            self.census.lock().there += 1;
            Some(Box::new(Self {
                inner,
                gate: Arc::clone(&self.gate),
                census: Arc::clone(&self.census),
                fail_after: None,
                arithmetic: self.arithmetic.clone(),
            }) as Box<dyn Backend>)
        }
        .boxed_local()
    }
    fn inner(&self) -> Option<&dyn Backend> {
        Some(self.inner.as_ref())
    }
    fn route(&self) -> Vec<RouteHop> {
        let mut route = self.inner.route();
        for hop in &mut route {
            if let Some(arithmetic) = &self.arithmetic {
                hop.arithmetic.clone_from(arithmetic);
            }
        }
        route
    }
    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        Some(self.inner.as_mut())
    }
}

impl Drop for Gated {
    fn drop(&mut self) {
        self.census.lock().there -= 1;
    }
}

pub(crate) struct Fixture {
    pub(crate) runtime: Runtime,
    pub(crate) service: Service,
    pub(crate) gate: Arc<Gate>,
    pub(crate) census: Arc<Mutex<Census>>,
}

pub(crate) fn fixture(settings: ServiceSettings) -> Fixture {
    let gate = Arc::new(Gate(watch::Sender::new(false)));
    let census = Arc::new(Mutex::new(Census {
        room: usize::MAX,
        ..Census::default()
    }));
    let (at, count) = (Arc::clone(&gate), Arc::clone(&census));
    let model = served(move |engine, exact| {
        let mut census = count.lock();
        census.asked.push(exact);
        if census.there >= census.room {
            return Err(ChatError::ShardUnavailable("stream_limit".into()));
        }
        census.there += 1;
        census.opened += 1;
        Ok(Box::new(Gated {
            inner: Box::new(engine.open()?),
            gate: Arc::clone(&at),
            census: Arc::clone(&count),
            fail_after: census.fail_after.take(),
            arithmetic: census.arithmetic.clone(),
        }))
    });
    let runtime = Runtime::new().unwrap();
    let service = Service::new(runtime.handle().clone(), vec![model], settings);
    Fixture {
        runtime,
        service,
        gate,
        census,
    }
}

pub(crate) fn settings(places: usize, waiting: usize, per_caller: usize) -> ServiceSettings {
    ServiceSettings {
        turns: QueueLimits {
            places,
            waiting,
            waiting_per_caller: per_caller,
            reserved: 0,
        },
        keep: PrefixCacheLimits {
            count: 2,
            idle_ms: 3_600_000,
            min_prefix: 4,
        },
        ..ServiceSettings::default()
    }
}

/// Ids of tokens, and their log probabilities with those of the likeliest ones.
type Scored = (Vec<u32>, Vec<(Option<f32>, Vec<(u32, f32)>)>);

fn request(text: &str, max_tokens: u32) -> ChatRequest {
    crate::tests::request(Prompt::Text(text.into()), max_tokens)
}

impl Fixture {
    /// Reads an answer to its end.
    fn end(&self, mut answer: Answer) -> Result<Done, ChatError> {
        self.runtime.block_on(async {
            loop {
                let next = tokio::time::timeout(TIMEOUT, answer.next()).await;
                match next.expect("an answer in time") {
                    Some(Ok(Frame::Done(done))) => {
                        assert!(answer.next().await.is_none());
                        return Ok(*done);
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(error),
                    None => panic!("an answer without an end"),
                }
            }
        })
    }

    /// Scored tokens of the prompt, and of the answer the ids and their log probabilities.
    fn logprobs(&self, request: ChatRequest) -> (Option<Vec<PromptToken>>, Scored) {
        let mut answer = self.begin("me", request);
        let (mut prompt, mut scored) = (None, Scored::default());
        self.runtime.block_on(async {
            while let Some(frame) = answer.next().await {
                match frame.unwrap() {
                    Frame::Prompt { tokens } => prompt = Some(tokens),
                    // The frame with the held-back text has none.
                    Frame::TokenDelta {
                        token_id,
                        logprob: Some(logprob),
                        top_logprobs,
                        ..
                    } => {
                        scored.0.push(token_id);
                        scored.1.push((Some(logprob), top_logprobs));
                    }
                    _ => {}
                }
            }
        });
        (prompt, scored)
    }

    fn begin(&self, caller: &str, request: ChatRequest) -> Answer {
        self.service.ask(caller, "tiny", request).unwrap()
    }

    fn say(&self, caller: &str, text: &str) -> Result<Done, ChatError> {
        self.end(self.service.ask(caller, "tiny", request(text, 8))?)
    }

    /// Waits until no chat runs or waits, and no conversation is left.
    pub(crate) fn until_empty(&self) {
        self.until("all is free", |load, census| {
            load.running + load.waiting + load.kept + census.there == 0
        });
    }

    /// Waits until load and census are as expected.
    pub(crate) fn until(&self, what: &str, is: impl Fn(Load, &Census) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !is(self.service.load(), &self.census.lock()) {
            assert!(
                Instant::now() < deadline,
                "{what}: {:?}",
                self.service.load()
            );
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_model_is_ready_for_grammars_before_the_first_one() {
    let f = fixture(settings(1, 1, 1));
    let model = &f.service.models()[0];
    f.until("the trie of the vocabulary", |_, _| {
        model.text.tokenizer.has_grammar_vocabulary()
    });
}

#[test]
fn concurrent_chats_give_the_same_answers_as_single_ones() {
    let f = fixture(settings(3, 16, 16));
    let alone = f.say("a", "hello hello").unwrap();
    let answers: Vec<Answer> = (0..10)
        .map(|n| {
            let (caller, hello) = (format!("caller {n}"), request("hello hello", 8));
            f.service.ask(caller.as_str(), "tiny", hello).unwrap()
        })
        .collect();
    for answer in answers {
        assert_eq!(f.end(answer).unwrap().token_ids, alone.token_ids);
    }
    f.until("all done", |load, _| load.running == 0 && load.waiting == 0);
}

/// Request for several answers, each of `max_tokens` tokens.
fn several(choices: u32, max_tokens: u32) -> ChatRequest {
    let mut request = request("hello hello hello", max_tokens);
    (request.sampling.temperature, request.sampling.seed) = (1.5, Some(u64::MAX - 1));
    request.options.choices = choices;
    request
}

#[test]
fn several_answers_are_those_of_single_requests_with_or_without_room_for_them() {
    const CHOICES: u32 = 4;
    let single = fixture(settings(1, 16, 16));
    let expected: Vec<Vec<u32>> = (0..CHOICES)
        .map(|index| {
            let mut one = several(1, 12);
            one.sampling.seed = Some(choice_seed(u64::MAX - 1, index));
            let answer = single.begin("me", one);
            single.end(answer).unwrap().token_ids
        })
        .collect();
    assert!(expected.windows(2).any(|two| two[0] != two[1]));
    for room in [usize::MAX, 2, 1] {
        let f = fixture(settings(1, 16, 16));
        f.census.lock().room = room;
        let mut answer = f.begin("me", several(CHOICES, 12));
        let (mut told, mut ends) = (vec![Vec::new(); 4], vec![None; 4]);
        let (mut opened, mut usage) = (0, None);
        f.runtime.block_on(async {
            while let Some(frame) = answer.next().await {
                match frame.unwrap() {
                    Frame::TokenDelta {
                        choice, token_id, ..
                    } => told[choice as usize].push(token_id),
                    Frame::ChoiceDone { choice, done } => {
                        assert!(ends[choice as usize].replace(done.token_ids).is_none());
                        opened = opened.max(f.census.lock().there);
                    }
                    Frame::Done(done) => usage = Some(done.usage),
                    _ => {}
                }
            }
        });
        for (index, tokens) in expected.iter().enumerate() {
            assert_eq!(ends[index].as_ref(), Some(tokens), "{index}, room {room}");
            assert_eq!(&told[index][..tokens.len()], tokens);
        }
        let usage = usage.expect("an end");
        let generated: usize = expected.iter().map(Vec::len).sum();
        assert_eq!(usage.completion_tokens as usize, generated);
        assert_eq!(usage.total_tokens, usage.prompt_tokens + generated as u32);
        assert!(opened <= room);
        // The conversation of the first answer is kept; the forks are closed.
        f.until("forks are left", |load, census| {
            (load.running, load.kept, census.there) == (0, 1, 1)
        });
    }
}

#[test]
fn an_answer_that_fails_or_loses_its_reader_ends_the_others() {
    let f = fixture(settings(1, 16, 16));
    f.census.lock().fail_after = Some(3);
    let answer = f.begin("me", several(4, 200));
    let error = f.end(answer).unwrap_err();
    assert_eq!(error, ChatError::ShardUnavailable("gone".into()));
    f.until_empty();

    let mut answer = f.begin("me", several(4, 200));
    f.runtime.block_on(async {
        while !matches!(answer.next().await, Some(Ok(Frame::TokenDelta { .. }))) {}
    });
    drop(answer);
    f.until_empty();
}

#[test]
fn a_request_for_no_tokens_runs_the_prompt_and_says_nothing() {
    let f = fixture(settings(1, 16, 16));
    let answer = f.service.ask("me", "tiny", request("hello hello hello", 0));
    let done = f.end(answer.unwrap()).unwrap();
    assert_eq!((done.text.as_str(), done.token_ids.len()), ("", 0));
    assert_eq!(done.finish_reason, FinishReason::Length);
    // The next request finds the prompt.
    let next = f.say("me", "hello hello hello").unwrap();
    assert_eq!(next.usage.cached_tokens, done.usage.prompt_tokens - 1);
    assert_eq!(f.census.lock().opened, 1);
}

#[test]
fn log_probabilities_of_a_prompt_are_those_of_its_tokens_sampled() {
    let f = fixture(settings(1, 16, 16));
    let mut asked = request("hello hello", 12);
    asked.sampling.logprobs = Some(2);
    let (ids, expected) = f.logprobs(asked.clone()).1;
    let done = f.end(f.begin("you", asked.clone()));
    let mut prompt = check(&f.service.model("tiny").unwrap().text, &asked).unwrap();
    let begin = prompt.len();
    prompt.extend(done.unwrap().token_ids);
    asked.prompt = Prompt::Tokens(prompt.clone());
    asked.max_tokens = Some(0);
    asked.options.prompt_logprobs = true;
    let (scored, _) = f.logprobs(asked);
    let scored = scored.expect("the prompt's");
    assert_eq!(scored.len(), prompt.len());
    assert_eq!((scored[0].logprob, scored[0].top_logprobs.len()), (None, 0));
    assert_eq!(ids, prompt[begin..]);
    for (token, (logprob, top)) in scored[begin..].iter().zip(expected) {
        assert_eq!(token.logprob.map(f32::to_bits), logprob.map(f32::to_bits));
        assert_eq!(token.top_logprobs, top);
    }
}

/// Vectors of texts, each with its number of tokens, and the counts of all.
fn vectors(f: &Fixture, inputs: &[Vec<u32>]) -> Result<(Vec<(Vec<f32>, u32)>, u32), ChatError> {
    let request = EmbedRequest {
        inputs: inputs.to_vec(),
        exact: None,
    };
    let mut answer = f.service.ask("me", "tiny", request)?;
    let (mut all, mut sum) = (Vec::new(), None);
    f.runtime.block_on(async {
        while let Some(frame) = answer.next().await {
            match frame? {
                Frame::ChoiceDone { choice, done } => {
                    assert_eq!(choice as usize, all.len());
                    let vector = done.embedding.expect("a vector").0;
                    all.push((vector, done.usage.prompt_tokens));
                }
                Frame::Done(done) => {
                    sum = Some(done.usage.total_tokens);
                    let vector = done.embedding.map(|vector| vector.0);
                    all.extend(vector.map(|vector| (vector, done.usage.prompt_tokens)));
                }
                _ => {}
            }
        }
        Ok::<_, ChatError>(())
    })?;
    Ok((all, sum.expect("an end")))
}

#[test]
fn vectors_of_several_texts_are_those_of_single_ones_over_one_backend() {
    let f = fixture(settings(1, 4, 4));
    let inputs = [vec![10, 11, 12], vec![10, 11, 12, 13, 14], vec![9]];
    let mut expected = Vec::new();
    for input in &inputs {
        let (mut alone, sum) = vectors(&f, std::slice::from_ref(input)).unwrap();
        assert_eq!((alone.len(), sum as usize), (1, input.len()));
        expected.append(&mut alone);
    }
    f.until_empty();
    assert_eq!(vectors(&f, &inputs).unwrap(), (expected, 9));
    assert_eq!(f.census.lock().opened, 4);
    // The conversation of an embedded text is not kept, because no request continues it.
    f.until_empty();
    f.say("me", "hello hello").unwrap();
    vectors(&f, &inputs).unwrap();
    assert_eq!(f.service.load().kept, 1, "that of the chat");
}

#[test]
fn a_text_whose_backend_fails_ends_the_request() {
    let f = fixture(settings(1, 4, 4));
    for after in 0..3 {
        f.census.lock().fail_after = Some(after);
        let failed = vectors(&f, &[vec![10], vec![11], vec![12]]).unwrap_err();
        assert_eq!(failed.code(), "shard_unavailable");
    }
    assert_eq!(vectors(&f, &[]).unwrap_err().code(), "bad_request");
    f.until_empty();
}

#[test]
fn more_than_may_wait_are_refused_and_the_others_are_answered() {
    let f = fixture(settings(2, 3, 2));
    f.gate.set(true);
    let mut answers = Vec::new();
    let mut refusals = Vec::new();
    for caller in ["a", "a", "a", "a", "a", "b", "c"] {
        match f.service.ask(caller, "tiny", request("hello", 2)) {
            Ok(answer) => answers.push(answer),
            Err(error) => refusals.push((caller, error.code())),
        }
    }
    // Two run; two of `a` and one of `b` wait.
    assert_eq!(refusals, [("a", Code::BUSY), ("c", Code::BUSY)]);
    assert_eq!((f.service.load().running, f.service.load().waiting), (2, 3));
    assert!(f.service.retry_after() >= Duration::from_secs(1));
    f.gate.set(false);
    for answer in answers {
        f.end(answer).unwrap();
    }
    f.say("c", "hello").unwrap();
}

#[test]
fn an_answer_that_is_dropped_frees_its_place_or_its_turn() {
    let f = fixture(settings(1, 4, 4));
    f.gate.set(true);
    let running = f.begin("a", request("hello", 100));
    let waiting = f.begin("a", request("hello", 100));
    let last = f.begin("b", request("hello", 2));
    f.until("one runs", |load, census| {
        load.waiting == 2 && census.there == 1
    });
    drop(waiting);
    assert_eq!(f.service.load().waiting, 1);
    drop(running);
    f.until("the place is passed on", |load, census| {
        (load.running, load.waiting, census.opened) == (1, 0, 2)
    });
    f.gate.set(false);
    f.end(last).unwrap();
    // Only the answered conversation is kept.
    f.until("all else is free", |load, census| {
        load.running == 0 && census.there == load.kept
    });
    assert_eq!(f.service.load().kept, 1);
}

#[test]
fn a_chat_that_has_waited_for_too_long_leaves_the_queue_and_is_told_so() {
    let f = fixture(ServiceSettings {
        longest_wait: Duration::from_millis(20),
        ..settings(1, 4, 4)
    });
    f.gate.set(true);
    let running = f.begin("a", request("hello", 2));
    let waiting = f.begin("b", request("hello", 2));
    let refused = f.end(waiting).unwrap_err();
    assert_eq!(refused.code(), Code::BUSY);
    assert!(refused.to_string().contains("waited"), "{refused}");
    assert_eq!((f.service.load().running, f.service.load().waiting), (1, 0));
    f.gate.set(false);
    f.end(running).unwrap();
    f.say("b", "hello").unwrap();
}

#[test]
fn a_caller_is_told_to_come_again_after_the_measured_time_of_answers() {
    let f = fixture(settings(1, 4, 4));
    let after = |answer_ms: Option<f64>| {
        f.service.0.lock().answer_ms = answer_ms;
        f.service.retry_after().as_secs()
    };
    assert_eq!(after(None), 1);
    f.gate.set(true);
    let asked = [(); 3].map(|()| f.begin("a", request("hello", 2)));
    // One chat runs and two wait, so a further chat would wait for three answers.
    assert_eq!(after(Some(8_000.0)), 24);
    assert_eq!(after(Some(80_000.0)), 60);
    // Chats that run for longer than earlier ones count more.
    let long_ago = Instant::now() - Duration::from_secs(10);
    f.service
        .0
        .lock()
        .running
        .values_mut()
        .for_each(|it| it.1 = long_ago);
    assert!((30..=60).contains(&after(Some(1_000.0))));
    f.gate.set(false);
    for answer in asked {
        f.end(answer).unwrap();
    }
}

#[test]
fn a_reader_that_takes_nothing_is_given_up_for_and_others_go_on() {
    let f = fixture(ServiceSettings {
        slow_reader: Duration::from_millis(50),
        ..settings(1, 4, 4)
    });
    let mut idle = f.begin("a", request("hello", 200));
    let done = f.say("b", "hello").unwrap();
    assert_eq!(done.usage.completion_tokens, 8);
    let end = f.runtime.block_on(async {
        loop {
            match idle.next().await {
                Some(Ok(_)) => {}
                end => return end.map(|frame| frame.map(|_| ())),
            }
        }
    });
    assert_eq!(end, Some(Err(ChatError::Cancelled)));
}

#[test]
fn the_next_turn_reuses_the_cached_conversation() {
    let f = fixture(settings(2, 4, 4));
    let mut messages = vec![ChatMessage::user("hello hello hello")];
    let ask = |caller: &str, messages: &[ChatMessage]| {
        let request = crate::tests::request(Prompt::Messages(messages.to_vec()), 8);
        f.end(f.begin(caller, request)).unwrap()
    };
    let first = ask("a", &messages);
    assert_eq!(first.usage.cached_tokens, 0);
    messages.push(ChatMessage::assistant(first.text));
    messages.push(ChatMessage::user("and again"));
    let second = ask("a", &messages);
    assert!(
        second.usage.cached_tokens >= first.usage.prompt_tokens,
        "{:?}",
        second.usage
    );
    assert_eq!(f.census.lock().opened, 1, "the same backend answered both");

    // The text equals that of a backend that computed everything anew.
    let fresh = ask("someone else", &messages);
    assert_eq!(fresh.usage.cached_tokens, 0);
    assert_eq!(fresh.token_ids, second.token_ids);
}

#[test]
fn kept_conversations_make_room_for_new_ones() {
    let f = fixture(settings(2, 4, 4));
    f.census.lock().room = 2;
    for text in ["first text", "second text", "third text", "fourth text"] {
        f.say(text, text).unwrap();
    }
    let census = f.census.lock();
    assert_eq!((census.opened, census.there), (4, 2));
    drop(census);
    // If running chats take all the room, the opener's error is returned.
    f.census.lock().room = 0;
    assert_eq!(
        f.say("fifth", "fifth text").unwrap_err().code(),
        "shard_unavailable"
    );
    f.until("nothing is kept for nothing", |load, _| load.kept == 0);
}

#[test]
fn a_conversation_whose_backend_failed_is_never_used_again() {
    let f = fixture(settings(1, 4, 4));
    f.census.lock().fail_after = Some(3);
    assert_eq!(
        f.say("a", "hello hello").unwrap_err().code(),
        "shard_unavailable"
    );
    f.until_empty();
    let done = f.say("a", "hello hello").unwrap();
    assert_eq!(done.usage.cached_tokens, 0);
}

#[test]
fn kept_conversations_end_after_their_time() {
    let mut settings = settings(1, 4, 4);
    settings.keep.idle_ms = 1;
    let f = fixture(settings);
    f.say("a", "hello hello").unwrap();
    f.until_empty();
}

#[test]
fn bad_requests_are_refused_without_a_backend() {
    let f = fixture(settings(1, 4, 4));
    let unknown = f.service.ask("a", "other", request("hello", 1)).err();
    assert_eq!(unknown.map(|e| e.code()), Some(Code::BAD_REQUEST));
    let empty = f.begin("a", request("", 1));
    assert_eq!(f.end(empty).unwrap_err().code(), "bad_request");
    let tokens = crate::tests::request(Prompt::Tokens(vec![1, 4_000_000]), 1);
    let tokens = f.begin("a", tokens);
    assert_eq!(f.end(tokens).unwrap_err().code(), "bad_request");
    assert_eq!(f.census.lock().opened, 0);
}

#[test]
fn draining_lets_chats_end_and_refuses_new_ones() {
    let f = fixture(settings(1, 4, 4));
    f.say("a", "kept for later").unwrap();
    f.gate.set(true);
    let first = f.begin("a", request("hello", 2));
    let second = f.begin("b", request("hello", 2));
    let service = f.service.clone();
    let drained = f.runtime.spawn(async move { service.drain(TIMEOUT).await });
    f.until("draining", |load, _| load.draining);
    let refused = f.service.ask("c", "tiny", request("hello", 2)).err();
    assert_eq!(refused, Some(ChatError::ShuttingDown));
    f.gate.set(false);
    f.end(first).unwrap();
    f.end(second).unwrap();
    f.runtime.block_on(drained).unwrap();
    f.until_empty();
}

#[test]
fn draining_cancels_chats_that_do_not_end_in_time() {
    let f = fixture(settings(1, 4, 4));
    f.gate.set(true);
    let running = f.begin("a", request("hello", 2));
    let waiting = f.begin("a", request("hello", 2));
    f.runtime.block_on(f.service.drain(Duration::ZERO));
    assert_eq!(f.end(running).err(), Some(ChatError::Cancelled));
    assert_eq!(f.end(waiting).err(), Some(ChatError::ShuttingDown));
    f.until_empty();
}
