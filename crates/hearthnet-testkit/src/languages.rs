//! Texts of several languages, and code.

/// Name and text.
pub const LANGUAGES: [(&str, &str); 14] = [
    (
        "English",
        "The harbour was quiet before sunrise. Two fishermen carried their nets to the boat, and an \
         old dog followed them along the wet stones without any hurry.",
    ),
    (
        "German",
        "Am Abend saßen die Nachbarn vor dem Haus und erzählten von früher. Die Kinder spielten im \
         Hof, bis es dunkel wurde, und niemand rief sie herein.",
    ),
    (
        "French",
        "Le boulanger ouvre sa porte à cinq heures du matin. Dans la rue, l'odeur du pain chaud se \
         mêle à celle de la pluie, et les premiers clients arrivent.",
    ),
    (
        "Spanish",
        "La abuela guardaba las cartas en una caja de madera. Cada domingo elegía una, la leía en \
         voz alta y luego la devolvía a su lugar con mucho cuidado.",
    ),
    (
        "Portuguese",
        "O comboio atrasou-se por causa da neve. Os passageiros partilharam o chá e as histórias \
         que tinham trazido, e a viagem pareceu curta.",
    ),
    (
        "Polish",
        "Zimą jezioro zamarza i dzieci uczą się jeździć na łyżwach. Wieczorem wszyscy piją gorącą \
         herbatę z miodem i słuchają radia.",
    ),
    (
        "Russian",
        "Поезд пришёл на станцию ночью, и на платформе никого не было. Только старый сторож стоял \
         под фонарём и читал вчерашнюю газету.",
    ),
    (
        "Arabic",
        "جلس الرجل العجوز أمام دكانه يشرب القهوة ويراقب المارة. كان يعرف أسماءهم جميعا ويسأل كل واحد \
         منهم عن أهله.",
    ),
    (
        "Hindi",
        "बारिश के बाद गाँव की सड़क पर मिट्टी की खुशबू थी। बच्चे कागज़ की नावें बना रहे थे और बूढ़े लोग चाय पी रहे थे।",
    ),
    (
        "Chinese",
        "清晨的市场已经很热闹了。卖菜的老人一边整理青菜，一边和熟客聊天，旁边的孩子在追一只花猫。",
    ),
    (
        "Japanese",
        "駅前の小さな本屋は、もう五十年も同じ場所にある。店主は客の顔を見るだけで、その人が探している本を当てる。",
    ),
    (
        "Korean",
        "할머니는 마당에 고추를 널어 놓고 하늘을 보셨다. 오후에 비가 온다는 소식에 우리는 모두 서둘러 마당으로 나갔다.",
    ),
    (
        "code",
        "fn median(mut values: Vec<f64>) -> Option<f64> {\n    values.sort_by(f64::total_cmp);\n    \
         let middle = values.len() / 2;\n    values.get(middle).copied()\n}\n",
    ),
    (
        "data",
        "{\"id\": 4711, \"name\": \"Kim\", \"tags\": [\"a\", \"b\"], \"price\": 19.99}\nSELECT name, \
         COUNT(*) FROM orders WHERE price > 10 GROUP BY name;\n",
    ),
];
