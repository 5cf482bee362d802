"""Chinese for the reference's tables, whose English is the code's: what flags take, what the everyday ones do."""

TAKES = {
    "a whole number": "整数",
    "a number": "数",
    "a name": "名称",
    "names with spaces between them": "以空格分隔的名称",
    "names with commas between them": "以逗号分隔的名称",
    "numbers with commas between them": "以逗号分隔的数",
    "whole numbers with commas between them": "以逗号分隔的整数",
    "one of auto, global, local, groups:SAMPLES (as groups:32)": "auto、global、local 或 groups:样本数，如 groups:32",
    "one of cross-entropy, bce, focal:GAMMA (as focal:2)": "cross-entropy、bce 或 focal:GAMMA，如 focal:2",
    "a time as 500steps, 1epoch or 10min, or 0 for never": "时间，如 500steps、1epoch、10min；0 表示从不",
    "a time as 6h, 90min, 30s or 1.5d": "时间，如 6h、90min、30s、1.5d",
}
FLAGS = {
    "--dataset": "digits、mnist、fashion-mnist、cifar10、cifar100、folder（自己的类别文件夹），"
    "或 package.module:factory；表格写 table:FILE.csv，torchvision 的数据集写 tv:NAME，datasets 库的写 hf:NAME。",
    "--data-dir": "数据集所在的目录，需要下载时也放在这里。",
    "--val-fraction": "没有验证集的数据，拿出这个比例来验证：由每张图片内容的哈希决定（0：五分之一）。",
    "--model": "自带的模型、torchvision 的任一分类模型（resnet18、vit_b_16……）、timm 的模型，"
    "或 package.module:factory。",
    "--init": "从这些权重开始：pretrained 或 pretrained:TAG，即 torchvision 或 timm 为 `--model` 发布的权重，"
    "换上新的分类头（模型的标签如 resnet18.a1_in1k 也表示要用它们）；"
    "或者一个文件、文件所在的目录：safetensors 或 state_dict。",
    "--epochs": "训练集过几遍。",
    "--batch-size": "全局批大小：优化器每一步所用的样本数，所有进程合计。",
    "--lr": "学习率的峰值，对应 `--base-batch-size` 大小的批。",
    "--optimizer": "sgd、adam、adamw、adadelta、muon（用于矩阵和卷积，其余用 AdamW）、muon-sgd（cifar10-speed 所用："
    "卷积核用 Muon，其余用 SGD）、timm:NAME（如 timm:lamb，需安装 timm），或 package.module:factory。",
    "--weight-decay": "权重衰减；作用于哪些参数见 `--decay-norms`。",
    "--schedule": "学习率在整个训练中的走势；装了 timm 时也可用它的（poly：以 `--gamma` 为幂）。",
    "--augment": "torchvision 的 v2 变换，写名称，如 randaugment:2,9 colorjitter:0.4,hue=0.1，"
    "或 package.module:function：依次进行，在其他参数的裁剪、翻转和 cutout 之前。",
    "--precision": "fp32、tf32（NVIDIA GPU），或 autocast 到 bf16、fp16（fp16 带梯度缩放）。",
    "--accumulate": "把每个全局批切成这么多个微批（省内存，这一步不变）；auto 或 0：试出来。",
    "--patience": "这么多次评估都没有更好的 `--keep-best` 就结束（0：不用）；学习率的走势仍按全部 epoch 计算。",
    "--seed": "权重、顺序、数据增强和 dropout 的随机种子。",
    "--nproc": "本机的进程数；auto：每个 GPU 一个，没有 GPU 时每两个核一个，最多 8 个。",
    "--gpus": "要用的 GPU，如 0,2。",
    "--workers": "每个训练进程有几个读图片的进程（流式加载）。",
    "--exact": "精确模式：每个批切成这么多个切片；进程数只要不超过它，结果逐比特一致（0：不用）。",
    "--out": "运行目录：config.json、journal.jsonl、weights/。",
    "--verbose": "开始时多说一些：核怎样分配、各个 rank 在哪里监听、哪些参数不做权重衰减。",
    "--log": "日志之外的副本，放在运行目录里：csv、tensorboard、wandb、mlflow、trackio。",
}


def translated(flag: str, cells: list[str]) -> list[str]:
    """A flag's row in Chinese, as far as there are words; its help where the row is that of `lockstep train`."""
    names, takes, default, text = cells
    said = TAKES.get(takes) or ", ".join(TAKES.get(part, part) for part in takes.split(", "))  # words to choose from
    return [names, said, default, FLAGS.get(flag, text)]
