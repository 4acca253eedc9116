//! Handler over a tiny real model on this machine, called over an in-memory socket.

use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::{
    Answering, BUS_PATH, CallContext, CallServer, CallStream, Client, Code, FrameSink, Handler,
    MAX_MESSAGE_BYTES, OneLevel, Registry,
};
use hearthnet_bus::log::Level;
use hearthnet_bus::{Capability, NodeId, NodeKey};
use hearthnet_files::sampling::{SamplerConfig, SamplingChoice};
use hearthnet_tokens::{ChatMessage, Grammar};
use hearthnet_transport::{PathRule, PeerSocket};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::request::{MAX_SEED, MAX_TEXT};
use super::*;
use crate::Cancel;
use crate::api::fields::tests::cases;
use crate::chat::{AnswerOptions, ChatRequest, Prompt, TurnOptions};
use crate::service::ServiceSettings;
use crate::tests::{request, served};

const MEMBER: OneLevel = OneLevel(Some(Level::Member));

struct World {
    client: Client,
    service: Service,
    /// Error of every attempt to open a backend, if set.
    broken: Arc<Mutex<Option<ChatError>>>,
}

async fn world() -> World {
    let broken: Arc<Mutex<Option<ChatError>>> = Arc::default();
    let error = Arc::clone(&broken);
    let model = served(move |engine, _| match &*error.lock() {
        Some(error) => Err(error.clone()),
        None => Ok(Box::new(engine.open()?)),
    });
    let service = Service::new(Handle::current(), vec![model], ServiceSettings::default());
    World {
        client: served_by(Arc::new(ChatHandler(service.clone()))).await,
        service,
        broken,
    }
}

impl World {
    fn chat(&self, params: &Value) -> CallStream {
        self.client.call(&Capability::chat(), params).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_comes_as_its_frames_and_is_the_services_own() {
    let world = world().await;
    let mut stream = world.chat(&json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "model": "tiny", "max_tokens": 20, "temperature": 0.5, "seed": 7, "top_p": 0.9,
    }));
    let (mut tokens, mut done) = (Vec::new(), None);
    while let Some(event) = stream.next().await.unwrap() {
        match event.name.as_str() {
            "token_delta" => tokens.push(event.data["token_id"].as_u64().unwrap() as u32),
            "done" => done = Some(event.data),
            other => assert!(["shard_status", "prompt_progress"].contains(&other)),
        }
    }
    assert_eq!(stream.result().await.unwrap(), json!({}));
    let done = done.unwrap();
    assert_eq!(done["seed"], 7);
    // Streamed text is not repeated, so that the frame stays small.
    assert!(done.get("text").is_none() && done.get("token_ids").is_none());

    let request = ChatRequest {
        sampling: SamplerConfig {
            temperature: 0.5,
            top_p: 0.9,
            seed: Some(7),
            ..SamplerConfig::default()
        },
        ..request(Prompt::Messages(vec![ChatMessage::user("Hi")]), 20)
    };
    let mut answer = world.service.ask("somebody", "tiny", request).unwrap();
    let mut expected = None;
    while let Some(frame) = answer.next().await {
        if let Frame::Done(done) = frame.unwrap() {
            expected = Some(*done);
        }
    }
    let expected = expected.unwrap();
    assert_eq!(done["usage"], json!(expected.usage));
    assert_eq!(tokens[..expected.token_ids.len()], expected.token_ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_gives_up_ends_the_answer() {
    let world = world().await;
    // The caller reads nothing, so the answer waits.
    let stream = world.chat(&json!({"prompt": "Once", "max_tokens": 32_768}));
    let until = async |running| {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while world.service.load().running != running {
            assert!(tokio::time::Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    until(1).await;
    drop(stream);
    until(0).await;
    assert_eq!(
        world.service.load().kept,
        0,
        "an answer that was given up is not kept"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_keeps_its_code_and_its_hint() {
    let world = world().await;
    let missing = ChatError::ShardUnavailable("no host has layers 3-4".into());
    *world.broken.lock() = Some(missing);
    let error = world
        .chat(&json!({"prompt": "Once"}))
        .result()
        .await
        .unwrap_err();
    assert_eq!(error.code().as_str(), "shard_unavailable");
    assert_eq!(error.message(), "no host has layers 3-4");
    assert!(error.hint().contains("`hearthnet up`"));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_refused_before_anything_runs() {
    let world = world().await;
    for (params, says) in cases::<(Value, String)>(json!([
        [{}, "params: give one of messages and prompt"],
        [{"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
         "params: give one of messages and prompt"],
        [{"messages": []}, "messages: must have at least one"],
        [{"messages": [{"role": "robot", "content": ""}]},
         "messages[0].role: must be one of system, user, assistant, tool"],
        [{"prompt": "a", "max_tokens": 0}, "max_tokens: must be a whole number from 1 to 32768"],
        [{"prompt": "a", "top_p": 1.5}, "top_p: must lie between 0 and 1"],
        [{"prompt": "a", "model": "b"}, "there is no model \"b\" here"],
        [{"prompt": "a", "best_of": 2}, "best_of: is not a parameter of this capability"],
    ])) {
        let error = world.chat(&params).result().await.unwrap_err();
        assert_eq!(error.code(), &Code::BAD_REQUEST);
        assert_eq!(error.message(), says);
    }
    assert_eq!(world.service.load().running, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_names_no_seed_is_told_the_one_that_was_drawn() {
    let world = world().await;
    let mut seeds = Vec::new();
    for _ in 0..2 {
        let mut stream = world.chat(&json!({"prompt": "Once", "max_tokens": 1}));
        while let Some(event) = stream.next().await.unwrap() {
            if event.name == "done" {
                seeds.push(event.data["seed"].as_u64().unwrap());
            }
        }
    }
    assert!(seeds.len() == 2 && seeds[0] != seeds[1]);
    assert!(seeds.iter().all(|seed| *seed <= MAX_SEED as u64));
}

/// Number of silence reports, and the result of the call.
async fn ask_of(client: Client) -> (usize, Unanswered) {
    let (runtime, (ended, end)) = (Handle::current(), oneshot::channel());
    // The call must not run on a runtime thread: the paused clock would stand still.
    std::thread::spawn(move || {
        let (mut silent, stall) = (0, Duration::from_secs(30));
        let mut hear = |news: News<'_>| silent += usize::from(matches!(news, News::Silent));
        let (request, cancel) = (elaborate(), Cancel::default());
        let answer = answer(
            &runtime, &client, "tiny", &request, &cancel, stall, &mut hear,
        );
        ended.send((silent, answer.unwrap_err())).unwrap();
    });
    end.await.unwrap()
}

/// Client of a node, the node's end of the socket, and its id.
async fn connected() -> (Client, PeerSocket, NodeId) {
    let [ours, node] = [1, 2].map(|seed| Arc::new(NodeKey::from_secret(&[seed; 32])));
    let rule = PathRule::new(BUS_PATH, MAX_MESSAGE_BYTES).with_text();
    let (socket, other) = PeerSocket::pair([ours.id(), node.id()], &rule).await;
    (Client::new(socket, ours), other, node.id())
}

/// Client of a node that answers chats with `handler`.
async fn served_by(handler: Arc<dyn Handler>) -> Client {
    let (client, socket, node) = connected().await;
    let registry = Arc::new(Registry::new());
    registry.register(descriptor(8), handler).unwrap();
    let server = CallServer::new(node, registry, Arc::new(MEMBER));
    tokio::spawn(async move { server.serve(socket).await });
    client
}

#[tokio::test(start_paused = true)]
async fn a_service_that_gives_no_sign_of_life_is_said_and_then_given_up() {
    let (client, _stopped, _) = connected().await;
    let (silent, ended) = ask_of(client).await;
    assert_eq!((silent, ended.heard), (1, 0));
    assert_eq!(ended.error.unwrap().code(), &Code::UNREACHABLE);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_takes_long_and_is_there_is_waited_for() {
    struct Slow;
    impl Handler for Slow {
        fn call(&self, _: CallContext, _: Value, _: FrameSink) -> Answering<'_> {
            Box::pin(async {
                tokio::time::sleep(Duration::from_secs(600)).await;
                Err(CallError::new(Code::BUSY, "in the end"))
            })
        }
    }
    let (silent, ended) = ask_of(served_by(Arc::new(Slow)).await).await;
    assert_eq!(silent, 0);
    assert_eq!(ended.error.unwrap().message(), "in the end");
}

/// Request with no default value.
fn elaborate() -> ChatRequest {
    ChatRequest {
        prompt: Prompt::Messages(vec![
            ChatMessage::system("Be brief."),
            ChatMessage::user("Hi"),
        ]),
        sampling: SamplerConfig {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.01,
            repetition_penalty: 1.1,
            presence_penalty: -0.3,
            frequency_penalty: 0.2,
            logit_bias: Vec::new(),
            penalty_window: hearthnet_files::sampling::MAX_PENALTY_WINDOW,
            penalise_prompt: false,
            seed: Some(7),
            logprobs: Some(3),
        },
        max_tokens: Some(20),
        stop: vec!["never said".into()],
        exact: None,
        grammar: None,
        turn: TurnOptions::default(),
        options: AnswerOptions::default(),
    }
}

#[test]
fn a_request_is_the_same_at_the_other_end() {
    let asked = ChatRequest {
        grammar: Some(Grammar::json_object()),
        options: AnswerOptions {
            choices: 2,
            ..AnswerOptions::default()
        },
        ..elaborate()
    };
    let params = params("tiny", &asked).unwrap();
    let given: Given = serde_json::from_value(params).unwrap();
    assert_eq!(given.model.as_deref(), Some("tiny"));
    let heard = given.into_request(&SamplingChoice::USUAL, 99).unwrap();
    assert_eq!(format!("{heard:?}"), format!("{asked:?}"));
}

#[test]
fn a_request_without_matching_parameters_is_not_sent() {
    let with = |change: fn(&mut ChatRequest)| {
        let mut request = elaborate();
        change(&mut request);
        params("tiny", &request)
    };
    assert!(with(|_| {}).is_some());
    assert_eq!(with(|r| r.prompt = Prompt::Tokens(vec![1])), None);
    assert_eq!(
        with(|r| r.prompt = Prompt::Text("x".repeat(MAX_TEXT + 1))),
        None
    );
    assert_eq!(with(|r| r.sampling.seed = Some(u64::MAX)), None);
    assert_eq!(with(|r| r.sampling.temperature = f32::NAN), None);
    assert_eq!(with(|r| r.sampling.penalise_prompt ^= true), None);
    assert_eq!(with(|r| r.sampling.logit_bias = vec![(1, 1.0)]), None);
    assert_eq!(with(|r| r.options.prompt_logprobs = true), None);
    assert_eq!(with(|r| r.max_tokens = Some(0)), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_come_out_as_they_went_in_to_the_byte() {
    let world = world().await;
    let mut stream = world.chat(&params("tiny", &elaborate()).unwrap());
    let (mut heard, mut frames) = (Vec::new(), Frames::default());
    while let Some(event) = stream.next().await.unwrap() {
        heard.extend(frames.read(&event.name, event.data).unwrap());
    }
    let mut answer = world.service.ask("somebody", "tiny", elaborate()).unwrap();
    let mut said = Vec::new();
    while let Some(frame) = answer.next().await {
        said.push(frame.unwrap());
    }
    // Durations differ.
    let lines = |frames: &mut Vec<Frame>| -> Vec<String> {
        frames.retain(|frame| !matches!(frame, Frame::PromptProgress { .. }));
        if let Some(Frame::Done(done)) = frames.last_mut() {
            assert!(done.timings.first_token_ms > 0.0);
            done.timings = crate::chat::Timings::default();
        }
        let lines = frames.iter().map(serde_json::to_string);
        lines.collect::<Result<_, _>>().unwrap()
    };
    assert!(said.len() > 20);
    assert_eq!(lines(&mut heard), lines(&mut said));
}

#[test]
fn an_event_of_a_later_version_is_passed_over_and_a_broken_end_is_not() {
    let mut frames = Frames::default();
    assert!(
        frames
            .read("weather", json!({"rain": true}))
            .unwrap()
            .is_none()
    );
    assert!(frames.read("token_delta", json!(5)).unwrap().is_none());
    assert!(frames.read("done", json!({})).is_err());
}
