//! Sessions over real TCP, TLS and WebSockets on the loopback interface.

use std::sync::Arc;

use bytes::Bytes;
use hearthnet_transport::{
    Admission, CloseCode, Config, Connection, DType, Hello, Identity, Listener, Message, PeerKey,
    Step, StepResult, Want, connect,
};

fn identity() -> Identity {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).unwrap();
    Identity::from_secret(&secret).unwrap()
}

struct Admit(PeerKey);

impl Admission for Admit {
    fn admit_peer(&self, key: &PeerKey) -> bool {
        *key == self.0
    }

    fn admit_hello(&self, _: &PeerKey, hello: &Hello, _: u64) -> Result<(), CloseCode> {
        match (hello.purpose.as_str(), hello.token.as_slice()) {
            ("bench", b"let me in") => Ok(()),
            ("bench", _) => Err(CloseCode::TokenInvalid),
            _ => Err(CloseCode::PurposeUnknown),
        }
    }
}

async fn echo(mut connection: Connection) {
    let sender = connection.sender();
    while let Ok(message) = connection.recv().await {
        if let Message::Step(step) = message {
            let result = StepResult {
                stream: step.stream,
                epoch: step.epoch,
                position: step.position,
                rows: step.rows,
                width: step.width,
                dtype: step.dtype,
                compute_us: 0,
                queue_us: 0,
                data: step.data,
            };
            sender.send(Message::StepResult(result)).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_goes_there_and_back() {
    let (host, caller) = (identity(), identity());
    let admission = Arc::new(Admit(caller.key()));
    let mut listener = Listener::bind("127.0.0.1:0", &host, admission, Config::default())
        .await
        .unwrap();
    let addr = listener.local_addr().to_string();
    let serving = tokio::spawn(async move { echo(listener.accept().await).await });
    let hello = Hello::new("bench", *b"let me in");
    let mut connection = connect(&addr, &caller, host.key(), hello, Config::default())
        .await
        .unwrap();
    for (position, rows) in [(0u32, 1u32), (1, 7), (8, 4000)] {
        let data: Vec<u8> = (0..rows * 576 * 2)
            .map(|i| (i * 7 + position) as u8)
            .collect();
        let step = Step {
            stream: 3,
            epoch: 1,
            position,
            rows,
            width: 576,
            dtype: DType::F16,
            want: Want::All,
            data: Bytes::from(data),
        };
        connection
            .sender()
            .send(Message::Step(step.clone()))
            .await
            .unwrap();
        let Message::StepResult(result) = connection.recv().await.unwrap() else {
            panic!("not a result")
        };
        assert_eq!((result.position, result.rows), (position, rows));
        assert!(result.data == step.data);
    }
    connection.close(CloseCode::Normal);
    serving.await.unwrap();
}
