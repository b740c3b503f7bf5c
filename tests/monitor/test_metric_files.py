"""Metric CSV files of every layout are read as what they say."""

import pytest

from trainprobe.errors import FormatError
from trainprobe.monitor.metric_files import read_metrics

WIDE = "vpp_stage,name,step,{micro}norm,min,shape,dtype\n"


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def all_records(folder):
    return [record for step in read_metrics(folder) for record in step.records]


def test_tidy_rows_of_one_value_become_one_record(tmp_path):
    head = "step,micro,rank,kind,name,call,slot,statistic,value,dtype,shape\n"
    rows = '3,,1,parameter,w,0,grad,norm,1.5,torch.float32,"[4, 4]"\n3,,1,parameter,w,0,grad,mean,nan,torch.float32,"[4, 4]"\n'
    write(tmp_path, "metrics.csv", head + rows + "3,,1,scalar,loss,0,value,value,2.0,float64,[]\n")
    gradient, loss = all_records(tmp_path)
    assert (gradient.site.name, gradient.site.slot, gradient.shape, gradient.values["norm"]) == ("w", "grad", (4, 4), 1.5)
    assert (gradient.step.number, gradient.place.rank, gradient.step.phase) == (3, 1, "backward")
    assert loss.values == {"value": 2.0}


def test_wide_files_of_the_first_version_are_read_with_rank_slot_and_micro_batch(tmp_path):
    folder = tmp_path / "Nov20_10-00-00-rank3-0a1b2c3d"
    write(folder, "actv_0-0.csv", WIDE.format(micro="micro_step,") + '0,layers.0.output,0,1,2.5,-1,"[4, 4]",torch.float32\n')
    write(folder, "actv_grad_0-0.csv", WIDE.format(micro="micro_step,") + "0,layers.0.input_1,0,0,0.5,0,[4],torch.float32\n")
    write(folder, "grad_reduced_0-0.csv", WIDE.format(micro="") + "0,layers.0.weight,0,0.25,0,[4],torch.float32\n")
    actv, actv_grad, grad = all_records(tmp_path)
    assert (actv.place.rank, actv.step.micro, actv.site.name, actv.site.slot) == (3, 1, "layers.0", "output")
    assert (actv_grad.site.name, actv_grad.site.slot, actv_grad.step.phase) == ("layers.0", "grad_input.1", "backward")
    assert (grad.site.kind, grad.site.slot, grad.values["norm"]) == ("parameter", "grad", 0.25)


def test_a_row_of_nan_without_a_shape_was_absent_and_one_with_a_shape_is_a_nan(tmp_path):
    folder = tmp_path / "x-rank0-00000000"
    rows = "0,unused,0,nan,nan,nan,nan\n" + '0,broken,0,nan,nan,"[4]",torch.float32\n'
    write(folder, "grad_reduced_0-0.csv", WIDE.format(micro="") + rows)
    (record,) = all_records(tmp_path)
    assert record.site.name == "broken"


def test_rows_with_more_fields_than_the_header_are_left_out(tmp_path):
    folder = tmp_path / "x-rank0-00000000"
    write(folder, "other_0-0.csv", WIDE.format(micro="") + "all_reduce,0,1,2,3,4,5,6,7,8,9\n0,w,0,1.0,0,[4],f32\n")
    assert [r.site.name for r in all_records(tmp_path)] == ["w"]


def test_files_of_the_second_version_are_read(tmp_path):
    folder = tmp_path / "rank_2"
    head = "vpp_stage,step,module_name,scope,norm\n"
    write(folder, "module_step0-0.csv", head + "-1,0,layers.0.output.0,forward,1.0\n-1,0,layers.0.grad_input.0,backward,2.0\n")
    write(folder, "optimizer_step0-0.csv", head + "-1,0,layers.0.weight.exp_avg,exp_avg,3.0\n")
    write(folder, "weight_grad_step0-0.csv", head + "-1,0,layers.0.weight,reduced,4.0\n")
    found = {(r.site.name, r.site.slot, r.place.rank): r.values["norm"] for r in all_records(tmp_path)}
    assert found == {
        ("layers.0", "output.0", 2): 1.0,
        ("layers.0", "grad_input.0", 2): 2.0,
        ("layers.0.weight", "exp_avg_after", 2): 3.0,
        ("layers.0.weight", "grad", 2): 4.0,
    }


def test_a_number_that_is_none_is_an_error_with_file_and_line(tmp_path):
    write(tmp_path / "x-rank0-00000000", "grad_reduced_0-0.csv", WIDE.format(micro="") + "0,w,0,abc,0,[4],f32\n")
    with pytest.raises(FormatError, match=r"grad_reduced_0-0.csv, line 2: 'abc' is not a number"):
        all_records(tmp_path)


def test_steps_come_in_order_although_files_do_not(tmp_path):
    folder = tmp_path / "x-rank0-00000000"
    for first in (1000, 2, 0):
        write(folder, f"grad_reduced_{first}-{first}.csv", WIDE.format(micro="") + f"0,w,{first},1.0,0,[4],f32\n")
    assert [s.step for s in read_metrics(tmp_path)] == [0, 2, 1000]
