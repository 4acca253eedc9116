//! Peers: admission, and isolation from each other.

use super::*;

/// A socket that stops reading when told to.
struct Deaf {
    socket: tokio::net::TcpStream,
    deaf: Arc<AtomicBool>,
}

impl AsyncRead for Deaf {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.deaf.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        Pin::new(&mut self.socket).poll_read(cx, into)
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_limit_holds_however_many_ask_at_once() {
    let host = Host::start().await;
    for round in 1..=5u32 {
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let mut caller = host.connect(PIPELINE).await;
            asking.spawn(async move {
                // All opens are on their way before the first answer is read.
                for stream in 1..=4 {
                    caller.send(open(stream)).await;
                }
                let (mut opened, mut refused) = (0, 0);
                for _ in 0..4 {
                    match caller.recv().await {
                        Message::StreamOpened(_) => opened += 1,
                        Message::StreamError(error) if error.code == "stream_limit" => refused += 1,
                        other => panic!("{other:?}"),
                    }
                }
                (opened, refused, caller)
            });
        }
        // The callers stay connected until all have their answers.
        let callers = asking.join_all().await;
        let count = |of: fn(&(u32, u32, Caller)) -> u32| callers.iter().map(of).sum::<u32>();
        assert_eq!((count(|c| c.0), count(|c| c.1)), (STREAMS, 16 - STREAMS));
        assert_eq!(host.running.stats().streams, STREAMS);
        assert_eq!(
            host.running.stats().errors["stream_limit"],
            u64::from(round * (16 - STREAMS))
        );
        drop(callers);
        host.until_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_frees_its_streams_and_spares_the_others() {
    let host = Host::start().await;
    let mut lost = host.connect(PIPELINE).await;
    let mut kept = host.connect(PIPELINE).await;
    lost.open(1).await.unwrap();
    lost.open(2).await.unwrap();
    kept.open(1).await.unwrap();
    lost.send(step(1, 0, &rows(30))).await;
    lost.result().await;
    host.probe.shut_gate();
    lost.send(step(1, 30, &rows(1))).await;
    host.probe.wait_inside();
    lost.send(step(2, 0, &rows(900))).await;
    host.until(|stats| stats.bytes_in == 931 * 8).await;
    drop(lost);
    host.until(|stats| stats.sessions == 1).await;
    assert_eq!(host.running.stats().streams, 1);
    host.probe.open_gate();
    kept.send(step(1, 0, &rows(3))).await;
    assert_eq!(
        kept.result().await.data,
        encode(&expected(0.0, 0, &rows(3)))
    );
    assert_eq!(host.probe.sequences.load(Ordering::SeqCst), 1);
    drop(kept);
    host.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_reads_no_answers_is_cut_off_before_they_pile_up() {
    let unread = 1 << 20;
    let host = Host::start_with(|config| {
        config.transport.send_buffer_bytes = unread;
        config.transport.max_steps_in_flight = 60_000;
    })
    .await;
    let (key, deaf) = (caller_key(), Arc::new(AtomicBool::new(false)));
    let socket = tokio::net::TcpStream::connect(host.running.local_addr())
        .await
        .unwrap();
    let io = Box::new(Deaf {
        socket,
        deaf: deaf.clone(),
    });
    let hello = Hello::new(PIPELINE, token(&key));
    let identity = key.identity().unwrap();
    let id = host_key().id();
    let connection = connect_over(io, "host", &identity, id, hello, Default::default());
    let mut caller = Caller(connection.await.unwrap());
    caller.open(1).await.unwrap();
    deaf.store(true, Ordering::SeqCst);
    // 16 KiB each, one after the other, far more than the system's buffers hold.
    let mut sent = 0;
    while host.running.stats().sessions == 1 {
        assert!(
            sent < 8192,
            "128 MiB of answers were kept for a peer that reads none"
        );
        caller.send(step(1, 0, &rows(2048))).await;
        sent += 1;
        host.until(|stats| stats.steps == sent || stats.sessions == 0)
            .await;
    }
    host.until_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bench_session_echoes_its_messages() {
    let host = Host::start().await;
    let mut caller = host.connect(BENCH).await;
    for bytes in [1u32, 1168, 3 << 20] {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let dims = Dims::new(&[bytes]).unwrap();
        let tensor = Message::Tensor(Tensor {
            dtype: DType::I8,
            dims,
            data: data.into(),
        });
        caller.send(tensor.clone()).await;
        assert_eq!(caller.recv().await, tensor);
    }
    // The caller may choose streams and widths freely: no engine is involved.
    caller.open(1).await.unwrap();
    let data: Bytes = (0..2000u32).map(|i| i as u8).collect::<Vec<_>>().into();
    for (want, range) in [
        (Want::All, 0..2000),
        (Want::Last, 1600..2000),
        (Want::None, 0..0),
    ] {
        caller
            .send(Message::Step(Step {
                rows: 5,
                width: 200,
                want,
                data: data.clone(),
                ..step_of(1, 3, &[])
            }))
            .await;
        let result = caller.result().await;
        assert_eq!(result.rows as usize * 400, range.len());
        assert_eq!(result.data, data.slice(range));
    }
    assert_eq!(host.running.stats().turns, 0);
}
